"""The `OpCase`: one operator of PyTorch's own test database, made to work on a batch of rows.

    OpInfo "nn.functional.relu", a sample [3, 5]

    tiled along 0     [7, 5]      the sample and rows of it once more, in another order
    tiled along 1     [3, 9]      the same for a batch that is the second dim
    stacked           [7, 3, 5]   seven samples, one after another: a batch of whole samples

Operands that have the batch too are tiled or stacked with it, as far as the operator allows; all
others are closed over, as weights are. A case is *row-wise in truth* if eager gives the same for
rows taken in parts and in another order.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchweft.errors import WeftError
from torchweft.run.compare import compare

NUM_ROWS = 7
MAX_SAMPLES = 30  # of an entry, to choose from
MAX_NUMEL = 200_000
SEED = 7
Tensors = list[torch.Tensor]

# Numbers that eager itself does not define: only shape and dtype are compared.
UNDEFINED: Mapping[str, str] = dict.fromkeys(
    ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"],
    "its entries are whatever the memory held before",
)
# Operators that are left out, because eager itself fails on them.
UNWELL: Mapping[str, str] = {
    "lu_unpack": "pivots that belong to other matrices make its kernel abort",
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
        "statistics of another number of channels make its kernel read beyond them",
    ),
    "native_group_norm": "it takes the number of rows as an argument, which contradicts a batch",
}


@dataclass(frozen=True)
class OpCase:
    """A function of a batch: `tensors` have their rows on `dim`, everything else is closed over."""

    name: str
    function: Callable[..., Any]
    tensors: Tensors
    dim: int
    row_wise: bool = False

    def fresh(self) -> Tensors:
        """The inputs once more: operators may write into them."""
        return [tensor.clone() for tensor in self.tensors]

    def eager(self) -> Any:
        """The result of plain PyTorch."""
        return seeded(self.function, self.fresh())

    def is_row_wise(self, wanted: Any) -> bool:
        """Whether parts, and rows in another order, give what eager gives for the whole."""
        rows = self.tensors[0].shape[self.dim]
        orders = [[*range(start, stop)] for start, stop in ((0, 2), (2, rows))]
        order = [*range(1, rows), 0]
        try:
            parts = [seeded(self.function, self._rows(part)) for part in orders]
            moved = seeded(self.function, self._rows(order))
        except Exception:  # it does not accept a part
            return False
        leaves = [tree_leaves(nest) for nest in (wanted, moved, *parts)]
        return all(_joins(*row, order=order) for row in zip(*leaves, strict=False))

    def _rows(self, order: Sequence[int]) -> Tensors:
        places = torch.tensor(order)
        return [tensor.index_select(self.dim, places) for tensor in self.tensors]


def _joins(wanted: Any, moved: Any, *parts: Any, order: list[int]) -> bool:
    """Whether parts make up the whole along one dim, and a new order of rows shows there."""
    if not isinstance(wanted, torch.Tensor):
        return bool(wanted == moved)
    for dim in range(wanted.dim()):
        if wanted.shape[dim] != sum(part.shape[dim] if part.dim() > dim else 0 for part in parts):
            continue
        try:
            joined = torch.cat(parts, dim)
        except (RuntimeError, IndexError):
            continue
        if wanted.shape[dim] == len(order) and compare(wanted, joined):
            rows = [wanted.narrow(dim, number, 1) for number in order]
            return bool(compare(torch.cat(rows, dim), moved))
    return False


def seeded(function: Callable[..., Any], tensors: Tensors) -> Any:
    """A call without gradients, with the random numbers that every other call gets."""
    torch.manual_seed(SEED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*tensors)


def op_infos() -> dict[str, Any]:
    """The entries of PyTorch's database that work in float32 on a CPU, by name."""
    try:
        from torch.testing._internal import common_methods_invocations as database
    except ImportError as error:
        raise WeftError(f"bench ops: {error}. Install it: pip install expecttest") from None
    # Some entries seed the random numbers inside, which Dynamo cannot capture; `seeded` does it.
    vars(database)["wrapper_set_seed"] = lambda op, *args, **kwargs: op(*args, **kwargs)
    entries: list[Any] = list(database.op_db)
    known = [info for info in entries if torch.float32 in info.supported_dtypes("cpu")]
    return {info.formatted_name: info for info in known}


def cases_of(info: Any, *, quick: bool = False) -> Iterator[OpCase]:
    """The cases of one entry; those that eager does not accept are left out.

    For each kind of batch there is one case that is row-wise in truth and one that is not; the
    first that is row-wise comes in all forms. quick: only between other calls.
    """
    kept: set[tuple[str, bool]] = set()
    for number, sample in enumerate(_samples(info)):
        nest = [sample.input, list(sample.args), dict(sample.kwargs)]
        for how, dim, batches in _batches(nest):
            case = next(filter(None, (_case(info, nest, batch, dim) for batch in batches)), None)
            if case is None:
                continue
            if (how, case.row_wise) in kept:
                continue
            first = case.row_wise and not any(row_wise for _, row_wise in kept)
            kept.add((how, case.row_wise))
            for form in (_within, _bare, _closed) if first and not quick else (_within,):
                shaped = form(case)
                if shaped is not None and _is_taken(shaped):
                    name = f"{info.formatted_name} sample {number} {how} {form.__name__[1:]}"
                    yield replace(shaped, name=name)


def _is_taken(case: OpCase) -> bool:
    """Whether eager accepts a case."""
    try:
        case.eager()
    except Exception:  # such as `+ 1` of a dtype without sums
        return False
    return True


def _samples(info: Any) -> Iterator[Any]:
    """Samples with tensors in them, no two alike in shapes and other arguments."""
    torch.manual_seed(SEED)
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = info.sample_inputs("cpu", torch.float32, requires_grad=False)
        for sample in itertools.islice(given, MAX_SAMPLES):
            nest = (sample.input, sample.args, sample.kwargs)
            kind = str(tree_map(lambda leaf: getattr(leaf, "shape", leaf), nest))
            tensors = _tensors(nest)
            if tensors and tensors[0].dim() and tensors[0].numel() < MAX_NUMEL and kind not in seen:
                seen.add(kind)
                yield sample


def _tensors(nest: Any) -> Tensors:
    leaves = [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.layout == torch.strided]


def _batches(nest: Any) -> Iterator[tuple[str, int, list[dict[int, torch.Tensor]]]]:
    """(name, dim, batches to try): a batch has the rows of tensors, by id. The first batch that
    eager accepts is used: that of all operands that can have it, or of the first alone."""
    tensors = {id(tensor): tensor for tensor in _tensors(nest)}
    first = next(iter(tensors.values()))
    for dim in range(min(2, first.dim())):
        size = first.shape[dim]
        if size > 1:
            alike = {n: t for n, t in tensors.items() if t.dim() > dim and t.shape[dim] == size}
            batch = {number: _tiled(tensor, dim) for number, tensor in alike.items()}
            yield f"tiled {dim}", dim, [batch, {id(first): batch[id(first)]}]
    batch = {number: _stacked(tensor) for number, tensor in tensors.items()}
    yield "stacked", 0, [batch, {id(first): batch[id(first)]}]


def _tiled(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    size = tensor.shape[dim]
    places = [
        *range(size),
        *(number * 5 % size for number in range(max(size - 1, NUM_ROWS - size))),
    ]
    return tensor.index_select(dim, torch.tensor(places))


def _stacked(tensor: torch.Tensor) -> torch.Tensor:
    rows = [tensor.roll(number, -1) if tensor.dim() == 1 else tensor for number in range(NUM_ROWS)]
    if tensor.is_floating_point():
        rows = [row * (1 + number / 64) for number, row in enumerate(rows)]
    return torch.stack(rows)


@dataclass(frozen=True)
class _Place:
    """Stands in a nest of arguments for an input, by its number."""

    number: int


def _case(info: Any, nest: Any, batch: dict[int, torch.Tensor], dim: int) -> OpCase | None:
    """The bare case with this batch, if eager takes it."""
    numbers = {key: number for number, key in enumerate(batch)}
    held = tree_map(lambda leaf: _Place(numbers[id(leaf)]) if id(leaf) in batch else leaf, nest)
    op = info.op

    def call(*tensors: torch.Tensor) -> Any:
        start, args, kwargs = _filled(held, tensors)
        return op(start, *args, **kwargs)

    case = OpCase(info.formatted_name, call, list(batch.values()), dim)
    try:
        made = case.eager()
    except Exception:  # the operator does not take a batch there
        return None
    results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
    if any(leaf.layout != torch.strided for leaf in results) or not sum(map(torch.numel, results)):
        return None
    return replace(case, row_wise=case.is_row_wise(made))


def _filled(nest: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(nest, _Place):
        return tensors[nest.number]
    if isinstance(nest, dict):
        return {key: _filled(item, tensors) for key, item in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)([_filled(item, tensors) for item in nest])
    return nest


def _bare(case: OpCase) -> OpCase:
    """The operator alone."""
    return case


def _within(case: OpCase) -> OpCase:
    """The operator between calls that are row-wise for certain."""
    call = case.function

    def within(*tensors: torch.Tensor) -> Any:
        given = [tensor * 1.0 if tensor.is_floating_point() else ~~tensor for tensor in tensors]
        return tree_map(_more, call(*given))

    return replace(case, function=within)


def _more(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    return ~leaf if leaf.dtype == torch.bool else leaf + 1


def _closed(case: OpCase) -> OpCase | None:
    """The same with only the first operand as input; those that have rows too are closed over."""
    first, *others = case.tensors
    within = _within(case).function
    if not others:
        return None
    return replace(
        case, function=lambda tensor: within(tensor, *others), tensors=[first], row_wise=False
    )
