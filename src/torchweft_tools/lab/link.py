"""A link of the lab: its rate and its duplex, as text that reads back.

LabLink.parse("2.5gbit").label            "2.5gbit half duplex"
LabLink.parse("500mbit full").label       "500mbit full duplex"
LabLink.parse("none").label               "loopback (unlimited)"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchweft.errors import MachineError, clip, unknown

UNITS = {"mbit": 10**6, "gbit": 10**9}
MIN_BITS_PER_S, MAX_BITS_PER_S = 10**6, 10**11
DUPLEXES = ("half", "full")
UNLIMITED = "loopback (unlimited)"
_ALLOWED = "Allowed: 1mbit to 100gbit, such as 500mbit, 1gbit or 2.5gbit, or none."
_TEXT = re.compile(r"([0-9]+(?:\.[0-9]+)?)(mbit|gbit)(?: (half|full)(?: duplex)?)?")


@dataclass(frozen=True)
class LabLink:
    """What joins the ranks: bits per second (0: plain loopback), and whether directions share."""

    bits_per_s: int = 0
    duplex: str = "half"

    def __post_init__(self) -> None:
        if self.duplex not in DUPLEXES:
            raise MachineError(f"link: {unknown('duplex', self.duplex, DUPLEXES)}")
        if self.bits_per_s and not MIN_BITS_PER_S <= self.bits_per_s <= MAX_BITS_PER_S:
            raise MachineError(f"link: {self.bits_per_s} bits a second is out of range. {_ALLOWED}")

    @classmethod
    def parse(cls, text: str, duplex: str | None = None) -> LabLink:
        """The link of a text such as "1gbit" or "1gbit full". Raises `MachineError`."""
        words = text.strip().lower()
        if words in ("none", "loopback", UNLIMITED):
            return cls(0, duplex or "half")
        match = _TEXT.fullmatch(words)
        if match is None:
            raise MachineError(f"link: {clip(text)} is not a rate. {_ALLOWED}")
        bits = float(match[1]) * UNITS[match[2]]
        if not MIN_BITS_PER_S <= bits <= MAX_BITS_PER_S:
            raise MachineError(f"link: {clip(text)} is out of range. {_ALLOWED}")
        if duplex and match[3] and duplex != match[3]:
            raise MachineError(f"link: {clip(text)} is not {duplex} duplex; leave one of them out.")
        return cls(round(bits), duplex or match[3] or "half")

    @property
    def label(self) -> str:
        """What a result was measured over: "1gbit half duplex", or "loopback (unlimited)"."""
        if not self.bits_per_s:
            return UNLIMITED
        unit = "gbit" if self.bits_per_s >= UNITS["gbit"] else "mbit"
        rate = f"{self.bits_per_s / UNITS[unit]:.9f}".rstrip("0").rstrip(".")
        return f"{rate}{unit} {self.duplex} duplex"
