"""Plans of the accelerator's own tests: plans.py KIND,...

A number is the seed of a random plan of a random graph. `contract-I` is plan I of the contract that
every runtime keeps; `contract-I-graphs` is the same, captured and replayed.
"""

import sys

import contract
import drawn
import torch

from torchweft.plan.machine import accelerator
from torchweft.run.accelerator.accelerator import Runtime, accelerator_of
from torchweft.run.accelerator.graphs import Graphs
from torchweft_tools.dryrun import mark

NUM_WARM = 4  # a plan is captured in its first calls
drawn.KIND = "cuda"  # where bodies that write in place have their rooms
torch.cuda.init()
device = accelerator_of(torch.device("cuda", 0))


def refuse(reason: str) -> None:
    raise AssertionError(reason)


def random_plan(seed: int):
    graph, bodies = drawn.drawn_graph(seed)
    runtime = Runtime(device)
    program = runtime.compile(drawn.drawn_plan(graph, seed), bodies)
    given = [item.cuda() for item in drawn.drawn_inputs()]
    return lambda: drawn.drawn_call(runtime, program, given)


def contract_plan(number: int, *, graphs: bool):
    graph, bodies = contract.diamond()
    strategy, num_lanes = [*contract.CASES, (contract.scatter, 3)][number]
    plan = contract.planned(strategy, num_lanes, graph, accelerator)
    runtime = Runtime(device, Graphs(device, refuse)) if graphs else Runtime(device)
    program = runtime.compile(plan, bodies)
    given = [item.cuda() for item in contract.inputs()]
    return lambda: runtime.run(program, given, plan.cut.bounds(contract.ROWS))


with torch.no_grad():
    for kind in sys.argv[1].split(","):
        name, *more = kind.split("-")
        is_contract = name == "contract"
        call = (
            contract_plan(int(more[0]), graphs=len(more) > 1)
            if is_contract
            else random_plan(int(name))
        )
        for _ in range(NUM_WARM if is_contract else 1):
            call()
        torch.cuda.synchronize()
        mark(f"steady {kind}")
        call()
        mark(f"end {kind}")
