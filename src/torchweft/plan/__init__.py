"""The middle: graphs, plans, and all that is made of them before anything runs. No torch here.

graph, machine, context      what is computed, where, and what is known when a call arrives
write/, strategies/          a strategy writes a bare plan
lower/                       issue order, copies, places, waits, frees
verify/                      safe, or an error with the step marked
simulator, cost, trace       how long it takes, on a virtual clock; what each lane did when
"""
