"""A `Size`: an integer that depends on symbols, such as `4096*s0 + 8`.

Shapes, bytes and flops are sizes, so that one graph and one plan serve every batch.
A size is a polynomial: a sum of terms, each an integer times a product of *atoms*. An atom is a
symbol (`s0`) or an expression that is not a polynomial, kept as text (`(s0//2)`, `max(1, s0)`).

    text --Size.parse--> Size --evaluate({"s0": 16})--> int        str(size) reads back

Parsing accepts integers, symbols, + - * // % and max/min/mod calls; nothing is ever executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import add, mul, sub
from typing import Any

from torchweft.errors import SizeError, clip

Monomial = tuple[str, ...]
MAX_TEXT = 2000
MAX_TERMS = 1000
MAX_DEPTH = 400
MAX_BITS = 4096
MAX_NUMBER_BITS = 200  # far below where a float ends


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial over symbols; `terms` are ((atoms...), factor), sorted, no factor zero."""

    terms: tuple[tuple[Monomial, int], ...] = ()

    @staticmethod
    def of(value: SizeLike) -> Size:
        """The size of an int, of text, or of a size (itself)."""
        if isinstance(value, Size):
            return value
        if isinstance(value, int):
            return Size((((), value),)) if value else ZERO
        return Size.parse(value)

    @staticmethod
    def parse(text: str) -> Size:
        """Read a size from text. Raises `SizeError` for anything but integer arithmetic."""
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            limit = f"must be an expression of at most {MAX_TEXT} characters"
            raise SizeError(f"size: a size {limit}; got {clip(text)}.")
        return _parse(text)

    def __add__(self, other: SizeLike) -> Size:
        return _from(list(self.terms) + list(Size.of(other).terms))

    def __sub__(self, other: SizeLike) -> Size:
        return self + Size.of(other) * -1

    def __mul__(self, other: SizeLike) -> Size:
        right = Size.of(other).terms
        if len(self.terms) * len(right) > MAX_TERMS:
            raise SizeError(f"size: a product of more than {MAX_TERMS} terms.")
        return _from(
            [(tuple(sorted(a + b)), m * n) for a, m in self.terms for b, n in right],
        )

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        texts = []
        for atoms, factor in self.terms:
            parts = ([str(factor)] if factor != 1 or not atoms else []) + list(atoms)
            texts.append("*".join(parts))
        return " + ".join(texts).replace("+ -", "- ")

    def evaluate(self, env: Mapping[str, int]) -> int:
        """The number, symbols taken from `env`. Raises `SizeError` if one is missing, or huge."""
        total = 0
        for atoms, factor in self.terms:
            for atom in atoms:
                value = env.get(atom)
                if value is None:
                    value = _evaluate(ast.parse(atom, mode="eval").body, env)
                factor *= value
            total += factor
        # A symbol of Dynamo's is not an int; looking at its value would put a guard on it.
        if type(total) is int and total.bit_length() > MAX_NUMBER_BITS:
            raise SizeError(f"size: {clip(self)} has more than {MAX_NUMBER_BITS} bits.")
        return total

    @property
    def symbols(self) -> frozenset[str]:
        """Every symbol that the size depends on."""
        return frozenset(name for atoms, _ in self.terms for atom in atoms for name in _names(atom))

    @property
    def constant(self) -> int | None:
        """The number if the size depends on no symbol, else None."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def unit(self) -> tuple[int, Size] | None:
        """(factor, atoms) if the size is a single product such as 4096 * (s0*s1), else None."""
        if len(self.terms) != 1:
            return None
        atoms, factor = self.terms[0]
        return factor, Size(((atoms, 1),))


SizeLike = int | str | Size
ZERO = Size()
ONE = Size((((), 1),))


def _from(terms: list[tuple[Monomial, int]]) -> Size:
    merged: dict[Monomial, int] = {}
    for atoms, factor in terms:
        merged[atoms] = merged.get(atoms, 0) + factor
    if any(factor.bit_length() > MAX_BITS for factor in merged.values()):
        raise SizeError(f"size: a number of more than {MAX_BITS} bits.")
    return Size(tuple(sorted((atoms, factor) for atoms, factor in merged.items() if factor)))


@lru_cache(maxsize=4096)
def _parse(text: str) -> Size:
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SizeError(f"size: cannot read {clip(text)}.") from None
    level: list[ast.AST] = [body]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise SizeError(f"size: more than {MAX_DEPTH} levels in {clip(text)}.")
    return _build(body, text)


def _build(node: ast.expr, text: str) -> Size:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return Size.of(number)
        case ast.Name(id=name):
            return Size((((name,), 1),))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _build(operand, text) * -1
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as kind, right=right):
            made: Size = _SIGNS[type(kind)](_build(left, text), _build(right, text))
            return made
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            if not 0 <= power <= 8:
                raise SizeError(f"size: a power in {clip(text)} is not from 0 to 8.")
            base, result = _build(left, text), ONE
            for _ in range(power):
                result = result * base
            return result
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as operator, right=right):
            sign = "//" if isinstance(operator, ast.FloorDiv) else "%"
            return _atom(f"(({_build(left, text)}){sign}({_build(right, text)}))")
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name.lower() not in _CALLS or not args or (name.lower() == "mod" and len(args) != 2):
                raise SizeError(f"size: {clip(text)} calls something else than max, min or mod.")
            inside = ", ".join(str(_build(arg, text)) for arg in args)
            return _atom(f"{name.lower()}({inside})")
    raise SizeError(f"size: {clip(text)} is not integer arithmetic over symbols.")


def _divide(left: int, right: int) -> tuple[int, int]:
    if right == 0:
        raise SizeError("size: division by zero.")
    return divmod(left, right)


_SIGNS: dict[type, Callable[..., Any]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul}
_CALLS: dict[str, Callable[..., int]] = {
    "max": lambda *items: max(items),
    "min": lambda *items: min(items),
    "mod": lambda left, right: _divide(left, right)[1],
}


def _atom(text: str) -> Size:
    node = ast.parse(text, mode="eval").body
    if not _names(text):
        return Size.of(_evaluate(node, {}))
    return Size((((text,), 1),))


@lru_cache(maxsize=4096)
def _names(atom: str) -> frozenset[str]:
    tree = ast.parse(atom, mode="eval")
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)) - set(_CALLS)


def _evaluate(node: ast.expr, env: Mapping[str, int]) -> int:
    """The value of an expression that `_build` has already admitted."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            if name not in env:
                raise SizeError(f"size: no value for symbol {name!r}.")
            return env[name]
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, env)
        case ast.Call(func=ast.Name(id=name), args=args):
            return int(_CALLS[name](*(_evaluate(arg, env) for arg in args)))
        case ast.BinOp(left=left, op=sign, right=right):
            a, b = _evaluate(left, env), _evaluate(right, env)
            if isinstance(sign, ast.FloorDiv | ast.Mod):
                return _divide(a, b)[isinstance(sign, ast.Mod)]
            return int(_SIGNS[type(sign)](a, b))
    raise SizeError("size: not integer arithmetic.")
