"""Where the time of a step went: timelines of all ranks come in, an `Explanation` goes out.

timeline      what each rank did when, from a trace of ours; formats/ reads those of others
intervals     unions and intersections of time
owners        an owner for every moment in which a rank computes nothing
path          the chain of works that ends last
what_if       another link, another device, more parts, by the one simulator
explanation   all of it as one value, as text and as plain data
"""
