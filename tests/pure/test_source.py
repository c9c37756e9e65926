"""Source that is written at run time: names of our own, constants for the rest, lines to show."""

from __future__ import annotations

import gc
import linecache
import time
import traceback

from torchweft.source import Source


def test_functions_come_from_lines_and_constants() -> None:
    source = Source("test", {"twice": lambda x: 2 * x})
    word = "__import__('os')"
    name = source.constant(word)
    assert source.constant(word) == name and source.constant("other") != name
    first, second = source.build(
        ["def first(x):", "  return twice(x)", f"def second(): return {name}"], "first", "second"
    )
    assert first(3) == 6 and second() == word and word not in source.text


def test_what_is_called_may_import_from_c() -> None:
    """C code asks the globals of the frame that runs for `__import__`; torch's hooks do."""
    source = Source("test")
    name = source.constant(time.strptime)
    (function,) = source.build([f"def function(): return {name}('2020', '%Y')"], "function")
    assert function().tm_year == 2020


def test_a_traceback_shows_the_line_for_as_long_as_the_functions_live() -> None:
    source = Source("test")
    (function,) = source.build(["def function(x):", "  return x.missing"], "function")
    try:
        function(1)
    except AttributeError:
        assert "return x.missing" in traceback.format_exc()
    assert source.filename in linecache.cache
    filename = source.filename
    del function, source
    gc.collect()
    assert filename not in linecache.cache


def test_two_of_one_kind_have_files_of_their_own() -> None:
    assert Source("test").filename != Source("test").filename
