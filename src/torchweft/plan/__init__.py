"""The middle: graphs, plans, and all that is made of them before anything runs. No torch here.

graph, machine, context      what is computed, where at which costs, and what is known of a call
write/, strategies/          a strategy writes a bare plan
lower/                       issue order, copies, places, waits, frees
verify/                      safe, or an error with the step marked
bound, improve               what no plan can beat; a search for quicker plans
simulator, trace             how long it takes, on a virtual clock; what each lane did when
"""
