"""A `Lazy`: stands for a tensor that has been asked for and not computed yet.

To user code it is a tensor: shapes and dtypes are known, operators and torch functions record
what they are called for, and whoever needs its numbers (`item`, `bool`, `print`) gets them: then
all that is pending runs first. It is a small Python object and no tensor, because thousands of
them are made for one batch of inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchweft.run.workers.cell import Spec

if TYPE_CHECKING:
    from torchweft.dynamic.recording import Recording


class Kind:
    """What values of one spec in one recording have in common; there is one object for each."""

    __slots__ = ("home", "spec")

    def __init__(self, spec: Spec, home: Recording) -> None:
        self.spec, self.home = spec, home


class Lazy:
    """The value `id` of a recording; `spec` is its shape and dtype."""

    __slots__ = ("id", "kind")
    __class__ = property(lambda self: Tensor)  # so isinstance(x, Tensor) holds

    def __init__(self, id: int, kind: Kind) -> None:
        self.id = id
        self.kind = kind

    @property
    def spec(self) -> Spec:
        return self.kind.spec

    @property
    def home(self) -> Recording:
        """The recording that it belongs to."""
        return self.kind.home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _home(args, kwargs or {}).function(func, args, kwargs or {})

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """Where the caller's tensors are."""
        return self.home.device

    def dim(self) -> int:
        return len(self.spec.shape)

    ndim = property(dim)

    def numel(self) -> int:
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.spec.shape[dim]

    def __len__(self) -> int:
        if not self.spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.spec.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.spec.shape:
            raise TypeError("iteration over a 0-d tensor")
        return iter([self[number] for number in range(self.spec.shape[0])])

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int:
            home = self.kind.home
            rows = home.rows_of.get(self.id)
            return home.select(self, index) if rows is None else rows[index]
        return self.home.function(Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        self.home.refuse_change(self, "assignment to an index")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__array__", "__dlpack__"):
            raise AttributeError(name)
        attribute = getattr(Tensor, name)
        if callable(attribute):
            return partial(self._method, name, attribute)
        plain = getattr(torch.empty(self.spec.shape, dtype=self.dtype, device="meta"), name, None)
        if isinstance(plain, (Tensor, type(None))) and name != "grad":
            return self.home.function(attribute.__get__, (self,), {})
        return plain

    def _method(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("_") and not name.endswith("__"):
            return self.home.change(self, name, args, kwargs)
        return self.home.function(method, (self, *args), kwargs)

    def __repr__(self) -> str:
        return f"Lazy({self.spec}, {self.id})"

    def __hash__(self) -> int:
        return id(self)


def lazies(numbers: Sequence[int], kind: Kind) -> list[Lazy]:
    """Values of one kind; without calls of `__init__`, which would take half of the time."""
    made = []
    for number in numbers:
        lazy = object.__new__(Lazy)
        lazy.id = number
        lazy.kind = kind
        made.append(lazy)
    return made


def real(item: Any) -> Any:
    """`item` itself, or the tensor behind it if it is lazy."""
    return item.home.real(item) if type(item) is Lazy else item


def _home(args: Any, kwargs: dict[str, Any]) -> Recording:
    """The recording of the first lazy value among the arguments."""
    stack = [*reversed(args), *kwargs.values()]
    while stack:
        item = stack.pop()
        if type(item) is Lazy:
            return item.home
        if isinstance(item, (list, tuple)):
            stack += reversed(item)
        elif isinstance(item, dict):
            stack += item.values()
    raise AssertionError("a torch function came here without a lazy argument")


def _operator(name: str) -> Any:
    function = getattr(Tensor, name)

    def method(self: Lazy, *args: Any) -> Any:
        return self.home.function(function, (self, *args), {})

    return method


def _number(name: str) -> Any:
    def method(self: Lazy, *args: Any) -> Any:
        return getattr(self.home.real(self), name)(*args)

    return method


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul "
    "rmatmul neg pos abs invert and rand or ror xor rxor lshift rshift eq ne lt le gt ge"
)
for _name in _OPERATORS.split():
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("bool", "int", "float", "complex", "index", "array", "contains"):
    setattr(Lazy, f"__{_name}__", _number(f"__{_name}__"))
