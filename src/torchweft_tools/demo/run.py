"""The live demo: two models that run here by plans, and what one process can and cannot gain.

for text in story(folder): ...      texts to print, in order; a trace is saved in the folder, if any
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from torchweft.api import compile, plans, report, trace
from torchweft.capture.marks import mark, mark_op
from torchweft.plan.machine import cpu
from torchweft.plan.strategies import branches
from torchweft_tools.bench.measure.pairs import measure

STORE_S = 0.02
"""What a slow disk or a remote store takes to answer; a sleep stands in for it."""


@torch.library.custom_op("weft_demo::read_rows", mutates_args=())
def read_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table that lives elsewhere: the answer takes `STORE_S`."""
    time.sleep(STORE_S)
    return table[ids]


@read_rows.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(ids.shape[0], table.shape[1])


class Ranker(nn.Module):
    """A tower of matmuls, and features that come from a store; both meet in the head."""

    def __init__(self, wide: int = 640) -> None:
        super().__init__()
        layers = [layer for _ in range(4) for layer in (nn.Linear(wide, wide), nn.ReLU())]
        self.tower, self.head = nn.Sequential(*layers), nn.Linear(wide, 1)
        self.register_buffer("table", torch.randn(100, wide))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """A score for each row."""
        stored = read_rows(self.table, ids)
        score: Tensor = self.head(self.tower(x) + stored)
        return score


def ranks(x: Tensor) -> Tensor:
    """The rank of each number; sorting one long row keeps one core busy."""
    return x.argsort().argsort().float()


class RankCorrelation(nn.Module):
    """Spearman's correlation of two columns: two branches that do not need each other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """How alike two columns are, from -1 to 1."""
        with mark("rank_left"):
            left = ranks(x)
        with mark("rank_right"):
            right = ranks(y)
        left, right = left - left.mean(), right - right.mean()
        correlation: Tensor = (left * right).sum() / (left.norm() * right.norm())
        return correlation


def story(folder: Path | None = None) -> Iterator[str]:
    """The texts of the live demo."""
    torch.manual_seed(0)
    yield "6. Now for real: an unmodified model that waits for a store while it multiplies.\n"
    rules = [mark_op("read_rows", name="read_rows", uses="io")]
    model = Ranker().eval()
    inputs = torch.randn(512, 640), torch.randint(0, 100, (512,))
    yield from _run(model, inputs, lambda m: compile(m, branches, rules=rules), folder)
    yield "7. Two branches of compute on two lanes:\n"
    pair = torch.randn(100_000), torch.randn(100_000)
    yield from _run(RankCorrelation(), pair, lambda m: compile(m, branches, machine=cpu(2)), None)
    yield "8. What one process cannot gain: a plain stack of layers has nothing to overlap.\n"
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    compile(plain, "overlap")
    with torch.no_grad():
        for _ in range(3):
            plain(torch.randn(64, 64))
    yield f"{report(plain)}\n"


def _run(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    compiled: Callable[[nn.Module], nn.Module],
    folder: Path | None,
) -> Iterator[str]:
    """Plan, check, time and draw one model."""
    with torch.no_grad():
        wanted = model(*inputs)
        compiled(model)
        outputs = model(*inputs)
        equal = "bit-equal" if torch.equal(wanted, outputs) else "equal within tolerance"
        torch.testing.assert_close(outputs, wanted)
        yield _indent(str(plans(model)[0]).partition("steps\n")[2].removesuffix("end\n"))
        happened = trace(model, *inputs)
        yield happened.to_text()
        if folder is not None:
            path = folder / "ranker.json"
            happened.save(path)
            yield f"   The trace is in {path.name}: open it in Perfetto (ui.perfetto.dev).\n"
        faster, control = measure(lambda: model.forward(*inputs), lambda: model(*inputs))
    yield (
        f"   Measured, {faster.num_pairs} pairs: {faster} as fast as eager, {equal}; "
        f"eager against itself: {control}.\n"
    )


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()) + "\n"
