"""The rate of the link that this process runs over, changed from inside the lab.

is_limited()          whether this process runs over a limited link
set_rate("2gbit")     changes the rate of its link, and of no other

With full duplex, each side limits what it sends: both have to set the rate.
"""

from __future__ import annotations

import os

from torchweft.errors import MachineError
from torchweft_tools.lab.command import _tool
from torchweft_tools.lab.inside import JOINT, LinkError, limit
from torchweft_tools.lab.link import LabLink


def is_limited() -> bool:
    """Whether this process runs in the lab, over a limited link."""
    return bool(_own().bits_per_s)


def set_rate(link: str | LabLink) -> None:
    """Give the link that this process runs over another rate.

    Raises `MachineError` where the link is not limited, and for a link of another duplex.
    """
    own, wanted = _own(), LabLink.parse(link) if isinstance(link, str) else link
    if not own.bits_per_s:
        raise MachineError(
            "lab: the link of this process is not limited; start it by `torchweft lab run`.",
            rule="lab",
        )
    if not wanted.bits_per_s or wanted.duplex != own.duplex:
        raise MachineError(
            f"lab: a link of {own.label} cannot become {wanted.label}; start another command.",
            rule="lab",
        )
    try:
        limit(_tool("tc") or "tc", JOINT if own.duplex == "full" else "lo", wanted.bits_per_s)
    except (LinkError, OSError) as error:
        raise MachineError(f"lab: the rate cannot be changed: {error}.", rule="lab") from error
    os.environ["WEFT_LINK"] = wanted.label


def _own() -> LabLink:
    label = os.environ.get("WEFT_LINK", "")
    return LabLink.parse(label) if label else LabLink()
