"""The house style, counted: sizes of files and functions, paths, words, no torch in the middle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from torchweft.graph import LEVELS, ROWS, USES
from torchweft.plan import KINDS
from torchweft.trace import SPANS

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "torchweft"
FILES = sorted(HOUSE.rglob("*.py"))
MAX_MIDDLE, MAX_PLACEMENT, MAX_FILE, MAX_FUNCTION = 4200, 3600, 600, 60


def middle(contract: str = "No torch in the middle") -> list[str]:
    """The modules of the middle, as the contract of import-linter lists them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    found = next(item for item in contracts if item["name"] == contract)
    return list(found["source_modules"])


def files_of(module: str) -> list[Path]:
    path = ROOT / "src" / module.replace(".", "/")
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


# The middle stands on these: words, numbers, files and machines, with no plan in them.
GROUND = {"blueprint", "bucket", "context", "cut", "errors", "files", "machine", "sizes"}
MIDDLE = [
    path
    for module in middle()
    if module.removeprefix("torchweft.") not in GROUND
    for path in files_of(module)
]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_middle_is_small() -> None:
    total = sum(map(lines, MIDDLE))
    assert len(MIDDLE) > 20
    assert total <= MAX_MIDDLE, f"the middle has {total} lines"


PLANNERS = middle("No torch in the planners")


def test_the_room_of_planners_is_small() -> None:
    total = sum(lines(path) for module in PLANNERS for path in files_of(module))
    assert total <= MAX_PLACEMENT, f"the planners have {total} lines"


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(HOUSE).as_posix())
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
        f"{path.relative_to(HOUSE)}: {hit[0]}"
        for path in FILES
        if path.relative_to(HOUSE).parts[0] not in ("integrations", "bench")
        for hit in HOST.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


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
    code = f"import {', '.join([*middle(), *PLANNERS])}, sys\n"
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
        pin for name in names for pin in re.findall(r"torch==[\w.+]+", (ROOT / name).read_text())
    }
    assert len(pins) == 1
