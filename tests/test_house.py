"""The house style, counted: sizes of files and functions, paths, words, no torch in the middle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torchweft.plan.graph import LEVELS, ROWS, USES
from torchweft.plan.plan import KINDS
from torchweft.plan.trace import SPANS

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "torchweft"
TOOLS = ROOT / "src" / "torchweft_tools"
OWN = sorted(HOUSE.rglob("*.py"))
FILES = [*OWN, *sorted(TOOLS.rglob("*.py"))]
MAX_TOTAL = 37_200
"""A ratchet: what a user imports. A change lowers it, or says in its message why it cannot.

A choice that never loses: races, costs and what is kept of them, prediction, a proven bound, a
search for plans that come near it and take part in the races, and an owner for every exposed
millisecond (`plan/explain`). Then the published strategies, one page each, and what they need:
control edges, declared kernels, rewrites, dealt rows, messages in parts, machines nobody has here.
At last what the rewrites lacked (decompose, fuse, heads), and what ranks compare at every call.
"""
MAX_SLACK = 6_000
MAX_ROOM_FILES, MAX_ROOM_LINES, MAX_FILE, MAX_FUNCTION = 14, 3000, 600, 60


def contract(name: str) -> list[str]:
    """The modules that a contract of import-linter is about."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    return list(next(item for item in contracts if item["name"] == name)["source_modules"])


MIDDLE, PLANNERS = contract("No torch in the middle"), contract("No torch in the planners")


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_what_a_user_imports_does_not_grow() -> None:
    total = sum(map(lines, OWN))
    print(f"{total} lines; the ratchet is at {MAX_TOTAL}")
    assert total <= MAX_TOTAL, f"{total - MAX_TOTAL} lines above the ratchet: what could go?"
    assert total > MAX_TOTAL - MAX_SLACK, f"lower the ratchet to {total}"


CALLED = """
import pathlib, sys
import torch
import torchweft as weft

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).eval()
x = torch.randn(4, 8)
for strategy in ("auto", "overlap"):
    weft.compile(model, strategy, remember=False)
    with torch.no_grad():
        model(x)
    print(weft.report(model), weft.trace(model, x))
house = pathlib.Path(weft.__file__).parent
files = {pathlib.Path(m.__file__) for m in [*sys.modules.values()] if getattr(m, "__file__", None)}
print(sum(len(f.read_text().splitlines()) for f in files if f.is_relative_to(house)))
"""
MAX_CALLED = 27_000


def test_what_a_compiled_call_imports_is_bounded() -> None:
    """Training, boundary mode, explanations, dynamic models: loaded by those who ask for them."""
    told = subprocess.run(
        [sys.executable, "-c", CALLED], capture_output=True, text=True, check=True
    )
    total = int(told.stdout.splitlines()[-1])
    print(f"{total} lines are loaded; the limit is at {MAX_CALLED}")
    assert total <= MAX_CALLED, f"{total - MAX_CALLED} lines too many: what can be loaded later?"


ROOMS = sorted({path.parent for path in FILES})


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(ROOT / "src").as_posix())
def test_a_room_is_small(room: Path) -> None:
    inside = list(room.glob("*.py"))
    assert len(inside) - 1 <= MAX_ROOM_FILES, "files"
    assert sum(map(lines, inside)) <= MAX_ROOM_LINES, "lines"


def test_no_file_holds_two_nouns() -> None:
    large = {path.name: lines(path) for path in FILES if lines(path) > MAX_FILE}
    assert not large, f"files above {MAX_FILE} lines"


def test_no_function_is_long() -> None:
    long = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or 0) - node.lineno + 1
                if count > MAX_FUNCTION:
                    long[f"{path.name}:{node.name}"] = count
    assert not long, f"functions above {MAX_FUNCTION} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / "src").as_posix())
def test_module_says_what_it_is(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert doc, f"{path.name} has no docstring"
    assert len(doc.splitlines()) <= 30


HOST = re.compile(
    r"\b(vllm|transformers|sglang|hugging ?face|diffusers|megatron|xdit|fastvideo|deepspeed)\b",
    re.I,
)


def test_no_host_is_named_in_the_core() -> None:
    """Hosts are known to their integrations, and to benches, which race them."""
    found = [
        f"{path}: {hit[0]}"
        for path in FILES
        if not path.is_relative_to(TOOLS) and path.parent.name != "integrations"
        for hit in HOST.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice


def test_private_parts_of_torch_are_used_in_one_room() -> None:
    """`torch._dynamo.reset` in a text is fine; operators such as `aten._to_copy` are no modules."""
    used = []
    for path in OWN:
        if path.parent.name == "private":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "torch"
            ):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            private = re.compile(r"torch\.(?!ops\.)(\w+\.)*_(?!_)\w+")
            used += [
                f"{path.name}:{node.lineno}: {name}" for name in names if private.fullmatch(name)
            ]
    assert not used


def test_asserts_have_a_message() -> None:
    bare = [
        f"{path.name}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Assert) and node.msg is None
    ]
    assert not bare


def committed() -> list[Path]:
    """What git knows or would take; in a copy of the tree without git, every file of ours."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = found.stdout.splitlines()
    if found.returncode != 0:
        kept = ("src", "tests", "docs", "requirements", ".ci")
        names = [str(p.relative_to(ROOT)) for part in kept for p in (ROOT / part).rglob("*")]
        names += [path.name for path in ROOT.glob("*.*")]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


# Spelt so that this file does not find itself.
FOLDERS = "|".join(("tmp", "work", "root", "opt", "home", "Users"))
MACHINE_PATH = re.compile(rf"(^|[^\w./-])/({FOLDERS})/\w", re.MULTILINE)


def test_no_path_of_a_machine_is_committed() -> None:
    found = []
    for path in committed():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {hit[0]!r}" for hit in MACHINE_PATH.finditer(text)]
    assert not found


def test_importing_the_middle_imports_no_torch() -> None:
    code = f"import {', '.join([*MIDDLE, *PLANNERS])}, sys\n"
    code += "print(*sorted({'torch', 'numpy', 'typer', 'rich'} & set(sys.modules)))"
    command = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


WORDS = {*KINDS, *ROWS, *USES, *LEVELS, *SPANS}


@pytest.mark.parametrize("word", sorted(WORDS))
def test_word_of_the_data_is_in_the_glossary(word: str) -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", glossary)


def test_pages_of_the_docs_are_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in readme]
    assert not missing


def test_torch_is_pinned_to_one_release_everywhere() -> None:
    names = ("Makefile", "pyproject.toml", "requirements/constraints.txt")
    pins = {
        pin for name in names for pin in re.findall(r"torch==\d[\w.+]+", (ROOT / name).read_text())
    }
    assert len(pins) == 1
