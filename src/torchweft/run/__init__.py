"""Runtimes: each carries out a verified plan with the one meaning of `docs/plans.md`.

program, writer      a plan as straight-line Python, one function a lane
cpu                  lanes as threads
accelerator/         lanes as streams; device graphs
eager/               boundary mode: the eager model itself, part by part
"""
