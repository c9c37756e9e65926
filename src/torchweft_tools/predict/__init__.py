"""What a model would take on machines that nobody has here: a config and a machine come in, a
simulated makespan comes out.

    config.json --shape--> ModelShape --model_graph--> Graph, works ----+
    8xh100 --hardware--> Hardware: a machine, and what its ops cost     +--prediction--> Prediction
    components.csv --tables--> MeasuredTimes (none: formulas alone) ----+

The graph is one rank's, with ops, marks and paths as captured graphs have them; strategies write
their plans for it, which are lowered, verified and simulated as any others. `docs/predictions.md`
says how well that meets what others have published.
"""
