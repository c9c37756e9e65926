"""Dynamic models: each input's own graph, recorded, batched, placed over devices and run.

model --record--> Recording --group--> groups --place--> Plan --workers--> outputs, Trace
"""
