"""The dynamic bench: batched execution, two unlike workers, a stream, a drift and a fault.

    batched     64 trees: per node (DynPartition), plain PyTorch, batched one by one, all together
    workers     measured against simulated makespan, for several planners
    stream      200 inputs over both workers, against the sum of what each does alone
    faults      a worker is killed, or stopped, in the middle of a stream
    drift       a worker becomes half as fast; prices follow
    recovery    the same for placed calls: how much of the loss 500 served inputs win back
    simulated   the same without workers or clock, on inputs that are never served

Trees come from SST if there is a data folder, else they are drawn. Every time includes recording,
grouping and planning. One worker is throttled, so its times are emulated.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchweft.dynamic.model import Dynamic
from torchweft.errors import WeftError, clip
from torchweft.files import write_json
from torchweft.placement.learn.learner import one_thread
from torchweft.run.workers.pool import Spot
from torchweft_tools.bench.measure.options import chosen
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns
from torchweft_tools.bench.models.dynamic_models import BinaryTreeLSTM, Tree
from torchweft_tools.bench.peers.dynpartition_nodes import per_node
from torchweft_tools.bench.players.dynamic_placed import run_placed
from torchweft_tools.bench.players.recovery import (
    Progress,
    no_progress,
    policy_of,
    served,
    simulated,
)

Input = tuple[Tree, Tensor]
FAST, SLOW = Spot("fast", cores=(0,)), Spot("slow", cores=(1,), slowness=2.0)


def read_trees(path: Path, count: int) -> tuple[list[Input], int]:
    """The first trees of a file of bracketed trees, and how many words they have."""
    vocabulary: dict[str, int] = {}
    inputs = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        tokens: list[str] = re.findall(r"[()]|[^\s()]+", line)[::-1]
        words: list[int] = []

        def node(tokens: list[str], words: list[int]) -> Tree:
            tokens.pop(), tokens.pop()  # a bracket and a label
            if tokens[-1] != "(":
                words.append(vocabulary.setdefault(tokens.pop(), len(vocabulary)))
                tokens.pop()
                return Tree(word=len(words) - 1)
            children = []
            while tokens[-1] == "(":
                children.append(node(tokens, words))
            tokens.pop()
            return Tree(children)

        tree = node(tokens, words)
        inputs.append((tree, torch.tensor(words)))
    return inputs, len(vocabulary)


def drawn_trees(count: int, seed: int = 0) -> tuple[list[Input], int]:
    """Random binary trees as large as those of SST."""
    draw, num_words = random.Random(seed), 1000
    inputs = []
    for _ in range(count):
        nodes = [Tree(word=number) for number in range(draw.randint(5, 33))]
        words = torch.tensor([draw.randrange(num_words) for _ in nodes])
        while len(nodes) > 1:
            at = draw.randrange(len(nodes) - 1)
            nodes[at : at + 2] = [Tree(nodes[at : at + 2])]
        inputs.append((nodes[0], words))
    return inputs, num_words


def trees_of(data: Path | None, count: int) -> tuple[list[Input], int, str]:
    """Trees, the number of their words, and where they come from."""
    if data is None:
        return *drawn_trees(count), "drawn"
    path = data / "sst" / "dev.txt"
    if not path.is_file():
        raise WeftError(f"data: there is no {path}; --data must name a folder with sst/dev.txt.")
    return *read_trees(path, count), "sst"


def dynet_s(
    python: str, model: BinaryTreeLSTM, inputs: Sequence[Input], repeats: int
) -> tuple[float, list[Tensor]]:
    """Seconds of DyNet's autobatching for all trees, and its outputs, in a Python with DyNet."""

    def plain(tree: Tree, words: list[int]) -> Any:
        return [plain(child, words) for child in tree.children] or words[tree.word]

    weights = {name: weight.tolist() for name, weight in model.state_dict().items()}
    trees = [plain(tree, words.tolist()) for tree, words in inputs]
    task = {"trees": trees, "weights": weights, "repeats": repeats}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.json"
        write_json(path, task)
        script = Path(__file__).with_name("peers") / "dynet_trees.py"
        command = [python, str(script), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WeftError(f"dynet: {python} failed to run it: {clip(done.stderr[-200:])}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], [torch.tensor(outputs) for outputs in answer["outputs"]]


def batched(
    data: Path | None, *, num_trees: int = 64, num_pairs: int = MIN_PAIRS, dynet: str = ""
) -> dict[str, Any]:
    """Milliseconds per tree of each way to run 64 trees on one thread, timed in turns, and how far
    the outputs differ."""
    inputs, num_words, source = trees_of(data, num_trees)
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words).eval()
    plain = [(tree, words.tolist()) for tree, words in inputs]
    with one_thread(), torch.no_grad(), Dynamic(model) as dynamic:

        def record() -> None:
            with dynamic.state.record():
                for each in inputs:
                    model.forward(*each)

        wanted = [per_node(model, *each) for each in plain]
        outputs = dynamic.map(inputs)
        times = in_turns({
            "per_node": lambda: [per_node(model, *each) for each in plain],
            "together": lambda: dynamic.map(inputs),
            "per_node_again": lambda: [per_node(model, *each) for each in plain],
            "plain": lambda: [model(*each) for each in inputs],
            "one_by_one": lambda: [dynamic(*each) for each in inputs],
            "recording": record,
        }, num_pairs)  # fmt: skip
    seconds = {name: statistics.median(each) for name, each in times.items()}
    if dynet:
        seconds["dynet"], theirs = dynet_s(dynet, model, inputs, num_pairs)
        gaps = [float((a - b).abs().max()) for a, b in zip(theirs, wanted, strict=True)]
        if max(gaps) > 1e-4:
            raise WeftError(f"dynet: its outputs differ by {max(gaps):.2g}; is it the same model?")
    apart = max(float((a - b).abs().max()) for a, b in zip(outputs, wanted, strict=True))
    rows = {f"{name}_ms": 1e3 * s / len(inputs) for name, s in seconds.items()}
    return {
        "trees": source, "num_trees": len(inputs), "num_pairs": num_pairs, **rows,
        **ratio_columns("batched_vs_per_node", times["per_node"], times["together"]),
        **ratio_columns("control", times["per_node"], times["per_node_again"]),
        "largest_difference": apart,
    }  # fmt: skip


def in_turns(ways: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, round by round, after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds + 1):
        for name, way in ways.items():
            began_s = time.perf_counter()
            way()
            if number:
                times[name].append(time.perf_counter() - began_s)
    return times


def placed(
    data: Path | None, *, num_calls: int = 12, size: int = 16,
    spots: Sequence[Spot] = (FAST, SLOW), progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """Measured and simulated milliseconds on two unlike workers, one row per planner: calls of many
    trees, and of one (with DynPartition's bandit)."""
    inputs, num_words, source = trees_of(data, num_calls * size)
    rows = run_placed(
        inputs, num_words, spots, size=size, progress=lambda done, total: progress(done, 2 * total)
    )
    rows += run_placed(
        inputs[: 2 * num_calls], num_words, spots, size=1,
        progress=lambda done, total: progress(done + total, 2 * total),
    )  # fmt: skip
    return {"trees": source, "workers": [spot.label for spot in spots], "rows": rows}


def stream(
    data: Path | None, *, num_inputs: int = 200, mem_dim: int = 300, batch: int = 16,
    num_rounds: int = MIN_PAIRS, spots: Sequence[Spot] = (FAST, SLOW),
) -> dict[str, Any]:  # fmt: skip
    """Inputs a second of each worker alone and of all together, in turns."""
    inputs, num_words, source = trees_of(data, num_inputs)
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words, mem_dim=mem_dim).eval()
    with ExitStack() as stack, torch.no_grad():

        def way(workers: Sequence[Spot]) -> Callable[[], object]:
            dynamic = Dynamic(copy.deepcopy(model), workers=workers, watchdog_s=60.0)
            stack.enter_context(dynamic)
            return lambda: list(dynamic.stream(inputs, batch=batch))

        ways = {spot.name: way([spot]) for spot in spots}
        together = way(spots)
        times = in_turns({**ways, "together": together, "again": together}, num_rounds)
    rates = {name: [len(inputs) / s for s in each] for name, each in times.items()}
    alone = [sum(each) for each in zip(*(rates[spot.name] for spot in spots), strict=True)]
    medians = {f"{name}_per_s": statistics.median(each) for name, each in rates.items()}
    return {
        "trees": source, "workers": [spot.label for spot in spots], "num_rounds": num_rounds,
        **medians, **ratio_columns("of_the_sum", rates["together"], alone),
        **ratio_columns("control", rates["together"], rates["again"]),
    }  # fmt: skip


def fault(
    data: Path | None, how: str = "SIGKILL", *, num_inputs: int = 200, at: int = 60,
    watchdog_s: float = 2.0, num_alone: int = 9, spots: Sequence[Spot] = (FAST, SLOW),
) -> dict[str, Any]:  # fmt: skip
    """A worker is killed or stopped in the middle of a stream: what became of every input, and how
    fast the last half of the rest was served, against the remaining worker alone."""
    inputs, num_words, source = trees_of(data, num_inputs)
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words).eval()
    wanted, seen_s, wrong, failed = [], [], 0, 0
    with torch.no_grad():
        wanted = [model(*each) for each in inputs]
        with Dynamic(model, workers=spots, watchdog_s=watchdog_s) as dynamic:
            _, pool = dynamic._workers()
            list(dynamic.stream(inputs[:20]))
            for number, answer in enumerate(dynamic.stream(inputs)):
                seen_s.append(time.perf_counter())
                if number == at:
                    process = pool.mates[spots[0].name].process
                    assert process is not None, "a local worker has a process"
                    os.kill(process.pid, getattr(signal, how))
                failed += answer.error is not None
                if answer.error is None and not torch.allclose(
                    answer.outputs, wanted[number], atol=1e-5
                ):
                    wrong += 1
            left = pool.names
            half = inputs[(at + len(inputs)) // 2 :]
            alone_s = in_turns({"alone": lambda: list(dynamic.stream(half))}, num_alone)["alone"]
            alone = len(half) / statistics.median(alone_s)
    gaps = [b - a for a, b in pairwise(seen_s)]
    after = len(half) / (seen_s[-1] - seen_s[-len(half) - 1])
    return {
        "trees": source, "signal": how, "inputs": len(inputs),
        "answered": len(seen_s) - failed, "failed": failed, "wrong": wrong, "left": left,
        "longest_gap_s": max(gaps), "after_per_s": after, "left_alone_per_s": alone,
        "left_alone_spread": [len(half) / s for s in (max(alone_s), min(alone_s))],
        "recovered": after / alone,
    }  # fmt: skip


def drift(data: Path | None, *, num_inputs: int = 200) -> dict[str, Any]:
    """A worker becomes half as fast while it serves: rates before, right after, and adapted."""
    inputs, num_words, source = trees_of(data, num_inputs)
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words, mem_dim=300).eval()
    with torch.no_grad(), Dynamic(model, workers=(FAST, Spot("other", cores=(1,)))) as dynamic:
        placer, pool = dynamic._workers()

        def rate(given: Sequence[Input]) -> float:
            began_s = time.perf_counter()
            list(dynamic.stream(given, batch=4))
            return len(given) / (time.perf_counter() - began_s)

        rate(inputs)
        before = rate(inputs)
        pool.mates["other"].send({"kind": "throttle", "slowness": 2.0})
        first, after = rate(inputs[:16]), rate(inputs)
        factors = [
            f for (_, device), f in placer.executor.prices.drift.items() if device == "other"
        ]
    return {
        "trees": source, "before_per_s": before, "first_per_s": first, "after_per_s": after,
        "drift_of_other": statistics.median(factors),
    }  # fmt: skip


def run(
    *,
    data: str = "",
    only: str = "",
    dynet: str = "",
    policy: str = "",
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the bench.

    data: a folder with sst/dev.txt; by default WEFT_DATA, else trees are drawn.
    only: names of rows, separated by commas; all by default.
    dynet: a Python that has DyNet, to race against its autobatching.
    policy: the file of the policy that learns; by default the one that comes with the package.
    quick: the row `batched` alone unless others are named, to see that everything runs.
    """
    only = only or ("batched" if quick else "")
    folder = data or os.environ.get("WEFT_DATA", "")
    where = Path(folder) if folder else None

    def inside(done: int, total: int) -> None:
        """Progress within a row: each row has a hundred ticks of the bar."""
        if progress is not None:
            progress(100 * len(rows) + 100 * done // total, 100 * len(wanted))

    rows: list[dict[str, Any]] = []
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "batched": lambda: batched(where, dynet=dynet),
        "placed": lambda: placed(where, progress=inside),
        "stream": lambda: stream(where),
        "killed": lambda: fault(where, "SIGKILL"),
        "stopped": lambda: fault(where, "SIGSTOP"),
        "drift": lambda: drift(where),
        "recovery": lambda: served(
            *trees_of(where, 200), policy=policy_of(policy), progress=inside
        ),
        "simulated": lambda: simulated(policy=policy_of(policy), progress=inside),
    }
    wanted = chosen("dynamic", "row", only, makers)
    for name in wanted:
        rows.append({"row": name, **makers[name]()})
        inside(0, 1)
    summary: dict[str, Any] = {}
    for row in rows:
        for key in ("batched_vs_per_node", "of_the_sum"):
            if key in row:
                summary[key] = row[key]
        if row["row"] in ("recovery", "simulated"):
            summary[f"{row['row']}_of_loss"] = row["recovered"]["learned"]
        if row["row"] == "placed":
            ran = [each for each in row["rows"] if "left_out" not in each]
            many = [each["simulator_error"] for each in ran if each["trees_a_call"] > 1]
            one = [each["simulator_error"] for each in ran if each["trees_a_call"] == 1]
            summary |= {"simulator_error": max(many), "simulator_error_one_tree": max(one)}
        if row["row"] in ("killed", "stopped"):
            summary[f"lost_when_{row['row']}"] = row["inputs"] - row["answered"] - row["failed"]
    return rows, summary
