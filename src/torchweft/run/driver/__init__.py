"""The driver of workers: decides which worker does what, sends it, and learns what it takes.

placing              groups of a call, placed by a planner, one that learns too; inputs of a stream
executor             sends jobs, brings rows home, plans anew what was lost
prices               what cells and links cost, measured, and followed as they drift
"""
