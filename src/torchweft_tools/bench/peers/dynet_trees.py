"""The same trees in DyNet with autobatching, in a Python that has it (`pip install dyNET38`).

    PYTHON_WITH_DYNET dynet_trees.py TASK.json      prints {"seconds": ..., "outputs": [...]}

DyNet needs numpy and no torch, so it has a venv of its own, and this file imports nothing of ours.
TASK has the trees as nested lists with the numbers of words as leaves, the weights of
`BinaryTreeLSTM` by name, and how often to run. The time includes building the graph, as ours
includes recording.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class Trees:
    """A binary Tree-LSTM on DyNet expressions."""

    def __init__(self, dynet: Any, weights: dict[str, Any]) -> None:
        import numpy

        self.dynet, self.model = dynet, dynet.ParameterCollection()
        arrays = {name: numpy.array(rows, dtype="float32") for name, rows in weights.items()}
        self.words = self.model.lookup_parameters_from_numpy(arrays.pop("embedding.weight"))
        for gate in ("i", "lf", "rf", "u"):  # DyNet adds one bias: both of ours together
            left, right = (f"composer.{gate}{side}.bias" for side in ("lh", "rh"))
            arrays[f"composer.{gate}.bias"] = arrays.pop(left) + arrays.pop(right)
        self.w = {name: self.model.parameters_from_numpy(array) for name, array in arrays.items()}

    def affine(self, name: str, x: Any) -> Any:
        return self.dynet.affine_transform([self.w[f"{name}.bias"], self.w[f"{name}.weight"], x])

    def gate(self, name: str, left: Any, right: Any) -> Any:
        sides = [self.w[f"composer.{name}{side}.weight"] for side in ("lh", "rh")]
        bias = self.w[f"composer.{name}.bias"]
        return self.dynet.affine_transform([bias, sides[0], left, sides[1], right])

    def visit(self, tree: Any, outputs: list[Any]) -> tuple[Any, Any]:
        """The state of a node; what it says goes to `outputs`."""
        dy = self.dynet
        if isinstance(tree, int):
            x = self.words[tree]
            c = self.affine("leaf.cx", x)
            h = dy.cmult(dy.logistic(self.affine("leaf.ox", x)), dy.tanh(c))
        else:
            (lc, lh), (rc, rh) = (self.visit(child, outputs) for child in tree)
            i = dy.logistic(self.gate("i", lh, rh))
            lf, rf = dy.logistic(self.gate("lf", lh, rh)), dy.logistic(self.gate("rf", lh, rh))
            u = dy.tanh(self.gate("u", lh, rh))
            c = dy.cmult(i, u) + dy.cmult(lf, lc) + dy.cmult(rf, rc)
            h = dy.tanh(c)
        outputs.append(dy.log_softmax(self.affine("output.l1", h)))
        return c, h

    def run(self, trees: list[Any]) -> list[list[Any]]:
        """The outputs of all nodes of all trees, computed together."""
        self.dynet.renew_cg()
        by_tree = []
        for tree in trees:
            outputs: list[Any] = []
            self.visit(tree, outputs)
            by_tree.append(outputs)
        self.dynet.forward([each for outputs in by_tree for each in outputs])
        return by_tree


def main(path: str) -> None:
    """Run the task of a file, and print what came of it."""
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    import dynet_config

    dynet_config.set(mem=2048, autobatch=1)
    import dynet

    model = Trees(dynet, task["weights"])
    first = [[each.npvalue().tolist() for each in outputs] for outputs in model.run(task["trees"])]
    times = []
    for _ in range(task["repeats"]):
        began_s = time.perf_counter()
        model.run(task["trees"])
        times.append(time.perf_counter() - began_s)
    seconds = sorted(times)[len(times) // 2]
    sys.stdout.write(json.dumps({"seconds": seconds, "outputs": first}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
