"""The driver of workers: decides which worker does what, sends it, and learns what it takes.

placing              groups of a call, placed by a planner: a script, cached; one that learns
feed                 whole inputs of a stream: which worker is fed next, and with how many
executor             sends jobs, brings rows home, plans anew what was lost
prices               what cells and links cost, measured, and followed as they drift
"""
