"""Benches: each measures a part of Weft against something simpler, and is a module with a `run`.

measure/   timing, counting, options       cases/     what benches draw or list
models/    models that benches run         players/   the processes that they start
oracle/    plans judged by brute force     peers/     programs that Weft races against
"""
