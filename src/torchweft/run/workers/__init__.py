"""Worker processes as a runtime: each device of a plan is a process that runs its lanes of it.

cell                 what a group computes, as checked data; what it may call
grouping, recorded   which ops of a recording run together; the rows that they read and make
program              groups as a `Graph`; what each device has to do of a plan
channel, pool        messages between processes; the processes, and the watch over them
worker               the process behind one device
"""
