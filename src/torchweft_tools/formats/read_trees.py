"""Bracketed trees, such as those of the Stanford Sentiment Treebank and of the Penn Treebank.

    (3 (2 It) (4 (4 (2 's) (2 good)) (2 .)))          label, then words (a leaf) or trees

Each bracket is an op that reads from the brackets in it. Leaves take 0.4 s and the others 1 s, the
proportion of the cells of a TreeLSTM. A file may hold many trees, each on one line or several.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torchweft.errors import PlacementError, clip
from torchweft.files import check_length
from torchweft.placement.problem import MAX_OPS
from torchweft_tools.formats.work import Work

LEAF_S, INNER_S = 0.4, 1.0
MAX_BRACKETS = 500_000
TOKEN = re.compile(r"[()]|[^\s()]+")
Tree = list[list[int]]
"""For each bracket the numbers of the brackets in it, which come before it."""


def read_trees(text: str) -> Iterator[Tree]:
    """All trees of a text, in order. Raises `PlacementError` with the line that is wrong."""
    check_length(text, PlacementError, "trees")
    if text.count("(") > MAX_BRACKETS:
        raise PlacementError(
            f"file: the trees have more than {MAX_BRACKETS} brackets.", rule="file"
        )
    tree: Tree = []
    open_brackets: list[list[Any]] = []  # of each, the brackets in it, and how many words
    for token in TOKEN.finditer(text):
        word = token.group()
        if word == "(":
            open_brackets.append([[], 0])
            if len(open_brackets) > MAX_OPS:
                raise _error(text, token.start(), f"a tree has more than {MAX_OPS} brackets")
        elif not open_brackets:
            raise _error(text, token.start(), f"{clip(word)} is outside all brackets")
        elif word == ")":
            inside, num_words = open_brackets.pop()
            if not inside and not num_words:
                raise _error(text, token.start(), "a bracket is empty")
            if inside and num_words > 1:
                raise _error(text, token.start(), "a bracket holds both words and brackets")
            tree.append(inside)
            if len(tree) > MAX_OPS:
                raise _error(text, token.start(), f"a tree has more than {MAX_OPS} brackets")
            if open_brackets:
                open_brackets[-1][0].append(len(tree) - 1)
            else:
                yield tree
                tree = []
        else:
            open_brackets[-1][1] += 1
    if open_brackets:
        raise _error(
            text, len(text), f"{len(open_brackets)} brackets are not closed; was the file cut off?"
        )


def tree_work(tree: Tree, name: str) -> Work:
    """The work of computing a tree from its leaves to its root; transfers take no time."""
    seconds = tuple(INNER_S if inside else LEAF_S for inside in tree)
    edges = tuple((source, op, 0.0) for op, inside in enumerate(tree) for source in inside)
    ops = tuple(f"node{op}" if inside else f"leaf{op}" for op, inside in enumerate(tree))
    return Work(name, ops, {"cpu": seconds}, edges)


def _error(text: str, at: int, why: str) -> PlacementError:
    line = text.count("\n", 0, at) + 1
    return PlacementError(f"file: line {line} of the trees: {why}.", rule="file")
