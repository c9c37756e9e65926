"""Lines of code of a file: those that hold code; docstrings, comments and empty lines do not."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

EMPTY = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> int:
    """How many lines of code a file has, or all Python files of a folder."""
    if path.is_dir():
        return sum(map(code_lines, path.rglob("*.py")))
    text = path.read_text(encoding="utf-8")
    documented = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    docs = {
        number
        for node in documented
        if ast.get_docstring(node, clean=False) is not None
        for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in EMPTY:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - docs)
