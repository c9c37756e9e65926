"""Tools around Weft: benches, the demo, the link lab and the dry run of CUDA.

`torchweft bench`, `demo`, `lab` and `dryrun` find them here; `import torchweft` loads none of them.
"""
