"""Worker processes as a runtime: each device of a plan is a process that runs its lanes of it.

cell, operators      what a group computes, as checked data; what it may call
grouping, store      which ops run together; the rows that they read and make
graphing, program    groups as a `Graph`; what each device has to do of a plan
recorded             a whole recording for one device, which groups it itself
channel, pool        messages between processes; the processes, and the watch over them
worker               the process behind one device
"""
