"""Random plans of random graphs, as the accelerator's own tests draw them: plans.py SEED,..."""

import sys

import drawn
import torch

from torchweft.run.accelerator.accelerator import Runtime, accelerator_of
from torchweft_tools.dryrun import mark

drawn.KIND = "cuda"  # where bodies that write in place have their rooms
torch.cuda.init()
runtime = Runtime(accelerator_of(torch.device("cuda", 0)))
with torch.no_grad():
    for seed in map(int, sys.argv[1].split(",")):
        graph, bodies = drawn.drawn_graph(seed)
        program = runtime.compile(drawn.drawn_plan(graph, seed), bodies)
        given = [item.cuda() for item in drawn.drawn_inputs()]
        drawn.drawn_call(runtime, program, given)
        torch.cuda.synchronize()
        mark(f"steady {seed}")
        drawn.drawn_call(runtime, program, given)
        mark(f"end {seed}")
