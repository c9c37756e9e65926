"""Copies inside Inductor's kernels, read from the code that it wrote.

    extern_kernels.mm(arg0_1, arg1_1, out=buf0)                  the product is made elsewhere,
    cpp_fused_copy__0(buf0, arg2_1, ks0)                         and a kernel
        auto tmp0 = ...::loadu(in_ptr0 + ...);                   loads it
        tmp0.store(out_ptr0 + ...);                              and stores it where it belongs

A store is *bare* if it stores what was loaded, unchanged. A body that writes to a given place hides
a copy if it has more bare stores into slices than its plain form has in all: a `clone` or a `cat`
of the model copies in every form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchweft.capture.bodies.inductor import Structure
from torchweft.serve.session import Session

KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)", re.M | re.S)
HEAD = re.compile(r"void\s+kernel\((.*?)\)", re.S)
POINTER = re.compile(r"\*\s*(\w+)")
MADE = re.compile(r"auto (tmp\d+) = (.*);")
LOADED = re.compile(r"(at::vec\S*loadu\(|\w*ptr\d+\[).*")
STORED = re.compile(r"(?:(tmp\d+)\.store\((\w+) |(\w+)\[.*\] = (tmp\d+);)")


def bare_stores(source: str) -> list[str]:
    """The tensors, by Inductor's names, that kernels store to without computing anything."""
    stores = []
    for name, code in KERNEL.findall(source):
        pointers = POINTER.findall(HEAD.findall(code)[0])
        for given in re.findall(rf"^ +{name}\((.*)\)$", source, re.M):
            by_pointer = dict(zip(pointers, given.split(", "), strict=False))
            stores += [by_pointer[pointer] for pointer in _bare(code) if pointer in by_pointer]
    return stores


def _bare(code: str) -> list[str]:
    """The pointers of a kernel that only bare stores write to."""
    made: dict[str, bool] = {}
    bare: dict[str, bool] = {}
    for line in code.splitlines():
        if match := MADE.search(line):
            made[match[1]] = LOADED.fullmatch(match[2]) is not None
        for vector, to, other, scalar in STORED.findall(line):
            pointer, stored = to or other, vector or scalar
            bare[pointer] = bare.get(pointer, True) and made.get(stored, False)
    return [pointer for pointer, is_bare in bare.items() if is_bare]


Known = Mapping[tuple[int, str], int]
"""The bare stores in the plain form of each op, by piece and name."""


def plain_copies(session: Session) -> Known:
    """The bare stores of all plain forms that a session has compiled."""
    return {key: len(bare_stores(source)) for key, _, source in _sources(session, in_place=False)}


def hidden_copies(session: Session, known: Known) -> list[str]:
    """The ops whose kernels copy what they should make in place."""
    copies = []
    for key, form, source in _sources(session, in_place=True):
        slices = [name for name in bare_stores(source) if name.startswith("arg")]
        if len(slices) > known.get(key, 0):
            copies.append(f"{form.name}: Inductor copies inside, to {', '.join(slices)}")
    return list(dict.fromkeys(copies))


def _sources(session: Session, *, in_place: bool) -> list[tuple[tuple[int, str], Structure, str]]:
    return [
        ((number, name), form, form.variants[0].source)
        for number, piece in enumerate(session.pieces)
        for name, body in piece.inner(None).bodies.items()
        for form in body.by
        if form.variants and bool(form.rooms) is in_place
    ]
