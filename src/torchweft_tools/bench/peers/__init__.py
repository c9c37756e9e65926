"""Models and peers of `bench overlap`: plain torch that knows nothing of Weft.

`models` are raced as written, by `floors` (compute alone, collectives alone), in loops
`overlap_by_hand`, and by what others offer: `stock` (Inductor), `domino` (DeepSpeed), `onednn`.
"""
