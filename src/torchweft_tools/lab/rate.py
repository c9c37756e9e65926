"""The rate of the link that this process runs over, changed from inside of the lab.

is_limited()          whether this process runs over a limited link
set_rate("2gbit")     from now on its link, and nobody else's, has this rate

Full duplex, each side limits what it sends: both have to set it.
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

    Raises `MachineError` outside of a limited link, and for a link of another duplex.
    """
    own, wanted = _own(), LabLink.parse(link) if isinstance(link, str) else link
    if not own.bits_per_s:
        raise MachineError("lab: this process runs over no limited link.", rule="lab")
    if not wanted.bits_per_s or wanted.duplex != own.duplex:
        raise MachineError(
            f"lab: a link of {own.label} cannot become {wanted.label}; start another command.",
            rule="lab",
        )
    try:
        limit(_tool("tc") or "tc", JOINT if own.duplex == "full" else "lo", wanted.bits_per_s)
    except (LinkError, OSError) as error:
        raise MachineError(f"lab: no other rate: {error}.", rule="lab") from error
    os.environ["WEFT_LINK"] = wanted.label


def _own() -> LabLink:
    label = os.environ.get("WEFT_LINK", "")
    return LabLink.parse(label) if label else LabLink()
