"""Sizes: arithmetic that reads back, and text that is no arithmetic."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import SizeError
from torchweft.plan.sizes import MAX_TEXT, Size

READS = {
    "4096*s0 + 8": {"s0": 16},
    "s0 - s0": {"s0": 3},
    "2*(s0 + s1)*s0": {"s0": 3, "s1": 5},
    "(s0 + 7)//8*8": {"s0": 9},
    "s0 % 4 + max(1, s0 // 2)": {"s0": 7},
    "min(s0, s1, 4)": {"s0": 9, "s1": 6},
    "mod(s0, 3)": {"s0": 8},
    "s0**3 - 1": {"s0": 2},
    "-s0": {"s0": 2},
}


@pytest.mark.parametrize("text", READS)
def test_size_has_the_value_of_its_text_and_reads_back(text: str) -> None:
    size, env = Size.parse(text), READS[text]
    calls = {"max": max, "min": min, "mod": lambda a, b: a % b}
    assert size.evaluate(env) == eval(text, {}, {**env, **calls})
    assert Size.parse(str(size)) == size
    assert size.symbols <= set(env)


NO_SIZES = [
    "", " ", "1.5", "'a'", "True", "s0 +", "x.y", "f(s0)", "__import__('os')", "lambda: 1",
    "s0 if 1 else 2", "[1]", "s0 / 2", "s0**-1", "s0**9", "s0**s0", "max()", "mod(1)", "1 // 0",
    "1 % 0", "mod(1, 0)", "s0\n+ 1", "\x00", "(" * 500 + "1" + ")" * 500, "-" * 1500 + "1",
    "1" * (MAX_TEXT + 1), "print(1)", "s0 := 1", "max(s0, key=s0)", "max(*s0)",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_SIZES)
def test_text_that_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(SizeError):
        Size.parse(text)


@pytest.mark.parametrize("found", [None, 1.5, [], {}, b"1"])
def test_what_is_no_text_is_refused(found: object) -> None:
    with pytest.raises(SizeError):
        Size.parse(found)  # type: ignore[arg-type]


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("text", ["(" * 9 + "9" + "**8)" * 9, "((a+b+c+d+e)**8)**8"])
def test_text_that_would_take_for_ever_is_refused_at_once(text: str) -> None:
    with pytest.raises(SizeError):
        Size.parse(text)


@pytest.mark.parametrize("text", ["4 // s0", "4 % s0", "mod(4, s0)"])
def test_division_by_a_symbol_that_is_zero_is_our_error(text: str) -> None:
    with pytest.raises(SizeError, match="division by zero"):
        Size.parse(text).evaluate({"s0": 0})


def test_missing_symbol_is_named() -> None:
    with pytest.raises(SizeError, match="no value for symbol 's1'"):
        Size.parse("s0*s1").evaluate({"s0": 2})


def test_maximum_of_one_is_itself() -> None:
    assert Size.parse("max(4)").evaluate({}) == 4
    assert Size.parse("max(s0)").evaluate({"s0": 3}) == 3


def test_equal_polynomials_are_equal_sizes() -> None:
    assert Size.parse("2*(s0 + 1)") == Size.parse("s0 + 2 + s0")
    assert Size.parse("s0*s1") == Size.parse("s1*s0")
    assert Size.parse("3*4").constant == 12
    assert Size.parse("s0 - s0").constant == 0
    assert Size.parse("s0").constant is None


atoms = st.sampled_from(["s0", "s1", "1", "7", "4096"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda text: f"({text} // 3)"),
        inner.map(lambda text: f"({text} % 5)"),
        st.tuples(inner, inner).map(lambda t: f"max({t[0]}, {t[1]})"),
    ),
    max_leaves=6,
)


@given(expressions, st.integers(0, 50), st.integers(0, 50))
def test_any_arithmetic_reads_back_with_its_value(text: str, first: int, second: int) -> None:
    size, env = Size.parse(text), {"s0": first, "s1": second}
    assert size.evaluate(env) == eval(text, {"max": max}, env)
    assert Size.parse(str(size)) == size


@given(st.text(max_size=60))
def test_any_text_is_a_size_or_our_error(text: str) -> None:
    with contextlib.suppress(SizeError):
        assert Size.parse(str(Size.parse(text))) == Size.parse(text)
