"""Operators in parts: row rules one by one against eager, and a slice of `torchweft bench ops`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torchweft as weft
from torchweft.capture.rows import math as rows_math
from torchweft.capture.rows.axes import RowRule
from torchweft.capture.rows.shape import unmoved
from torchweft.run.compare import compare
from torchweft.serve.session import Report
from torchweft_tools.bench import ops

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ROWS = 7
PLACES = torch.tensor([0, 1, 2, 0, 1, 2, 0])
TABLE = torch.linspace(-1, 1, 30).view(10, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def rand(*sizes: int) -> torch.Tensor:
    return torch.randn(ROWS, *sizes)


def run(function: Callable[..., Any], *inputs: Any, batch: int = 0) -> Report:
    """Run in even and in uneven parts, compare with eager, and give the report."""
    for strategy in (weft.overlap(parts=2), ops.uneven()):
        torch._dynamo.reset()
        fresh_inputs = [item.clone() for item in inputs]
        wanted = function(*[item.clone() for item in inputs])
        compiled = weft.compile(function, strategy, batch=batch)
        verdict = compare(wanted, compiled(*fresh_inputs))
        assert verdict, str(verdict)
    return weft.report(compiled)


def reasons(report: Report) -> list[str]:
    """Why ops run whole that are not only peeled off for want of a copy."""
    told = [why for piece in report.pieces for _, _, why in piece.whole_ops]
    return [why for why in told if "is needed whole" not in why]


VIEWS = {
    "relu": lambda x: torch.relu(x).view(x.shape[0], 5, 1).float(),
    "layer norm": lambda x: F.layer_norm(x, (5,)).unsqueeze(1).float(),
    "convolution": lambda x: F.conv1d(x[:, None], torch.ones(4, 1, 2)).flatten(1).float(),
    "twice": lambda x: (torch.relu(x).view(-1, 5, 1).float(), x.sum(0)),
    "read again": lambda x: (lambda y: (y, F.layer_norm(y, (1,))))(x.exp().view(-1, 5, 1).float()),
}


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_a_view_that_is_handed_out_under_another_name_is_made(function: Any) -> None:
    report = run(function, rand(5))
    assert [plan.num_parts for piece in report.pieces for plan in piece.plans] == [2]


def test_a_view_of_an_input_under_another_name_has_nothing_to_split() -> None:
    report = run(lambda x: x.view(-1, 5).contiguous(), rand(5))
    assert [plan.num_parts for piece in report.pieces for plan in piece.plans] == [1]
    assert "shares bytes" in report.fallbacks[0][0]


def put(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y[:, torch.tensor([0, 2])] = values
    return y + 1


def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q = x.view(x.shape[0], 1, 5, 1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask) + 1


CLOSED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "select_scatter": (lambda x, y: torch.select_scatter(x * 1.0, y, 1, 0) + 1, rand()),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x * 1.0, y, 1, 0, 2) + 1, rand(2)),
    "index_put": (put, rand(2)),
    "attention mask": (attend, rand(1, 5, 5) > -1),
    "cross_entropy": (lambda x, y: F.cross_entropy(x * 1.0, y, reduction="none") + 1, PLACES),
    "multi_margin": (lambda x, y: F.multi_margin_loss(x * 1.0, y, reduction="none"), PLACES),
    "gather": (lambda x, y: (x * 1.0).gather(1, y) + 1, PLACES[:, None]),
    "index_add": (lambda x, y: (x * 1.0).index_add(1, torch.tensor([1]), y) + 1, rand(1)),
    "where": (lambda x, y: torch.where(y, x * 1.0, 2.0) + 1, rand(1) > 0),
    "solve": (lambda x, y: torch.linalg.solve(y, (x * 1.0)[..., None]) + 1, rand(5, 5)),
    "searchsorted": (lambda x, y: torch.searchsorted(y, x * 1.0) + 1, rand(3).sort(-1).values),
}


@pytest.mark.parametrize("name", CLOSED)
def test_an_operand_as_large_as_the_batch_that_is_no_input_is_not_taken_for_all_rows(
    name: str,
) -> None:
    function, held = CLOSED[name]
    run(lambda x: function(x, held), rand(5))
    report = run(function, rand(5), held)  # as an input it has rows
    assert not reasons(report), report


def test_masks_of_a_fused_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    padding = torch.arange(5) >= torch.tensor([5, 5, 4, 5, 5, 5, 5])[:, None]
    padding[2] = False  # values at padded tokens differ between torch's own paths
    shared = torch.zeros(5, 5, dtype=torch.bool)
    shared[0, 1:] = True
    run(lambda x: layer(x * 1.0, src_key_padding_mask=padding) + 1, rand(5, 8))
    run(lambda x: layer(x * 1.0, src_mask=shared) + 1, rand(5, 8))
    run(lambda x, m: layer(x * 1.0, src_key_padding_mask=m) + 1, rand(5, 8), padding)


def write(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y[torch.arange(x.shape[0]), i] = v
    return y + 1


def bilinear(x: torch.Tensor) -> torch.Tensor:
    return F.bilinear(x * 1.0, x + 1, torch.ones(4, 3, 3)) + 1


def unpool(x: torch.Tensor) -> torch.Tensor:
    return F.max_unpool2d(*F.max_pool2d(x * 1.0, 2, return_indices=True), 2) + 1


def stft(x: torch.Tensor) -> torch.Tensor:
    made = torch.stft(x * 1.0, 16, return_complex=True, window=torch.ones(16))
    return torch.view_as_real(made) + 1


def lu_solve(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(x + 3 * torch.eye(3)), y) + 1


CAUSAL = create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu")


def flex(**options: Any) -> Any:
    return lambda x: flex_attention(x * 1.0, x, x, **options) + 1


def step(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    carry = torch.tanh(carry @ torch.ones(4, 4) + x)
    return carry, carry * 2


def mixing_step(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return step(carry, x - x.mean(0))


SPLIT: dict[str, tuple[Any, ...]] = {
    "t_copy": (lambda x: torch.t_copy(x * 1.0) + 1, rand(5)),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x, t, reduction="none"), rand(3, 4), rand(4).long().abs(),
    ),
    "row of each": (lambda x, i: (x * 1.0)[torch.arange(x.shape[0]), i] + 1, rand(3), PLACES),
    "rows of each": (
        lambda x, i: x[torch.arange(x.shape[0])[:, None], i] + 1, rand(3, 2), PLACES[:, None],
    ),
    "write to each": (write, rand(3), PLACES, rand()),
    "embedding_bag": (lambda i: F.embedding_bag(i, TABLE) + 1, rand(4).abs().long()),
    "bilinear": (bilinear, rand(3)),
    "fold": (lambda x: F.fold(x * 1.0, (4, 5), (2, 2)) + 1, rand(12, 12)),
    "stft": (stft, rand(64)),
    "squeeze": (lambda x: (x * 1.0).squeeze() + 1, rand(1, 3)),
    "searchsorted": (lambda x, y: torch.searchsorted(x.sort(-1).values, y) + 1, rand(4), rand(2)),
    "pinv": (lambda x: torch.linalg.pinv(x * 1.0) + 1, rand(4, 3)),
    "lu_solve": (lu_solve, rand(3, 3) / 4, rand(3, 2)),
    "max_unpool": (unpool, rand(3, 4, 4)),
    "renorm of rows": (lambda x: torch.renorm(x * 1.0, 2, 0, 1.0) + 1, rand(3)),
    "cross": (lambda x: torch.linalg.cross(x * 1.0, x + 1) + 1, rand(3)),
    "gather": (lambda x, i: x.gather(1, i), rand(3), PLACES[:, None]),
    "unbind_copy": (lambda x: torch.unbind_copy(x * 1.0, 1), rand(3)),
    "map": (lambda x: map_rows(lambda row, w: row @ w, x * 1.0, torch.ones(4, 2)), rand(3, 4)),
    "scan": (lambda x: scan(step, x[:, 0] * 1.0, x + 1, dim=1)[1] + 1, rand(5, 4)),
    "flex_attention": (flex(score_mod=lambda score, b, h, q, k: score + (q - k)), rand(2, 16, 8)),
    "flex_attention, masked": (flex(block_mask=CAUSAL), rand(2, 16, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_row_wise_in_truth_and_in_parts(name: str) -> None:
    function, *inputs = SPLIT[name]
    report = run(function, *inputs)
    assert not reasons(report), report


def kept(x: torch.Tensor, i: torch.Tensor) -> Any:
    numbers = torch.arange(x.shape[0])
    return x[numbers, i] + 1, numbers.contiguous()


def written(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(x.shape[0])
    numbers[:, None].clamp_(max=3)
    return x[numbers, i] + 1


MIXING: dict[str, tuple[Any, ...]] = {
    "cumsum": (lambda x: (x * 1.0).cumsum(0) + 1, rand(3)),
    "renorm of columns": (lambda x: torch.renorm(x * 1.0, 2, 1, 1.0) + 1, rand(3)),
    "numbers of rows": (lambda x: x + torch.arange(x.shape[0])[:, None], rand(3)),
    "next row": (lambda x, i: x[(torch.arange(x.shape[0]) + 1) % 7, i], rand(3), PLACES),
    "numbers handed out": (kept, rand(3), PLACES),
    "numbers written": (written, rand(3), PLACES),
    "another table": (
        lambda x, i: TABLE[torch.arange(x.shape[0]), i] * x[:, 0], rand(3), PLACES,
    ),
    "score by row": (flex(score_mod=lambda score, b, h, q, k: score + b), rand(2, 16, 8)),
    "scan that mixes": (
        lambda x: scan(mixing_step, x[:, 0] * 1.0, x + 1, dim=1)[1] + 1, rand(5, 4),
    ),
    "scan along rows": (
        lambda x: scan(step, torch.zeros(1, 4), (x * 1.0)[:, None])[1] + x[:, None], rand(4),
    ),
    "rows by index": (lambda x, i: x[i] + x, rand(3), PLACES),
    "a place in the storage": (lambda x: x.as_strided(x.size(), x.stride(), 0) + 1, rand(3)),
    "windows across rows": (lambda x: x.as_strided((x.shape[0], 3), (1, 3)) + 1, rand(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_stays_whole(name: str) -> None:
    function, *inputs = MIXING[name]
    assert reasons(run(function, *inputs))


def test_cov_with_weights_is_right() -> None:
    run(lambda x: torch.cov(x * 1.0, aweights=torch.ones(5)) + 1, rand(5))
    report = run(lambda x, w: torch.cov(x * 1.0, aweights=w.abs()) + 1, rand(5), torch.randn(5))
    assert "traced for one number of rows" in str(report)


def test_inputs_that_are_one_batch_are_one_in_its_guards() -> None:
    report = run(lambda x, i: x.gather(0, i) + 1, rand(3).t(), PLACES[None], batch=1)
    assert not reasons(report), report
    assert not report.fallbacks


@pytest.fixture(scope="module")
def infos() -> Any:
    pytest.importorskip("expecttest", reason="PyTorch's database of operators needs it")
    from torchweft_tools.bench.cases.op_cases import op_infos

    return op_infos()


def test_a_wrong_rule_is_seen(infos: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchweft.capture.rows.rows.rule_for", lambda func: RowRule(unmoved))
    assert ops.look(infos["cumsum"], quick=True).verdict == "wrong"


def test_a_failing_rule_keeps_the_op_whole(infos: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: Any) -> Any:
        return rows_math.along({}["no such argument"])

    monkeypatch.setattr("torchweft.capture.rows.rows.rule_for", lambda func: RowRule(broken))
    row = ops.look(infos["cumsum"], quick=True)
    assert row.verdict == "right_whole" and "its row rule failed (KeyError" in row.whole[0]


def test_a_slice_of_the_bench_is_right(infos: Any, tmp_path: Any) -> None:
    journal = str(tmp_path / "ops.jsonl")
    rows, summary = ops.run(quick=True, journal=journal)
    named = {name: summary[name] for name in ("wrong", "foreign", "hang")}
    assert named == {"wrong": [], "foreign": [], "hang": []}, rows
    assert summary["own_error"] == 0, [row for row in rows if row["verdict"] == "own_error"]
    assert summary["right_split"] >= 0.65 * summary["ops"], summary
    assert ops.run(quick=True, journal=journal) == (rows, summary)  # nothing is run again
