"""The self-test: what a node can do, tried on the node, as one bundle to send back.

    torchweft selftest --device cuda --ranks 8 --bundle selftest.json
    torchweft selftest --device cpu --ranks 2
    torchweft selftest --dryrun --ranks 8        no device: what would be asked of one

Checks run on all ranks together (`checks`), apart in ranks of their own where a rank must fail
(`checks.APART`), or as a recorded program without a device (`recorded`).
"""
