"""The way in: a model, traced by Dynamo, becomes a `Graph` with a body for each op.

Dynamo's graph --rows--> kinds --units, regions--> ops --assembly--> Capture
"""
