"""Options that several benches share: text from the command line comes in, checked values go out.

chosen("hosts", "host", "vllm", HOSTS)  ["vllm"]
like_links("1gbit,none,2gbit")          [["1gbit ...", "2gbit ..."], ["loopback ..."]]
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from torchweft import lab
from torchweft.errors import WeftError, unknown
from torchweft_tools.bench.measure.pairs import MIN_PAIRS


def words(text: str) -> list[str]:
    """The words of a text, which commas separate."""
    return [word.strip() for word in text.split(",") if word.strip()]


def chosen(bench: str, kind: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a text; all that are known if it is empty. Raises `WeftError` for others."""
    choices = list(known)
    for name in words(text):
        if name not in choices:
            raise WeftError(f"bench {bench}: {unknown(kind, name, choices)}", rule="option")
    return words(text) or choices


def require_pairs(bench: str, num_pairs: int, *, quick: bool | None = None) -> None:
    """Raise `WeftError` if there are too few pairs for a ratio that can be trusted.

    quick: a quick run may have any number of them; None if the bench has no such option.
    """
    if not quick and num_pairs < MIN_PAIRS:
        cure = " To see that everything runs, use --quick." if quick is not None else ""
        text = f"--pairs must be {MIN_PAIRS} or more; got {num_pairs}.{cure}"
        raise WeftError(f"bench {bench}: {text}", rule="option")


def like_links(text: str) -> list[list[str]]:
    """The labels of links, grouped by kind: ranks can switch between links of one kind."""

    def kind(link: lab.LabLink) -> tuple[bool, str]:
        return not link.bits_per_s, link.duplex

    parsed = sorted(map(lab.LabLink.parse, words(text)), key=kind)
    if not parsed:
        raise WeftError("link: name at least one link, such as 1gbit or none.", rule="option")
    return [[link.label for link in like] for _, like in groupby(parsed, kind)]
