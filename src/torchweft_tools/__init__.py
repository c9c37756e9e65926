"""Tools around Weft: benches, the demo, the link lab and the dry run of CUDA.

The commands `torchweft bench`, `demo`, `lab` and `dryrun` use them; `import torchweft` does not.
"""

import sys

from torchweft.errors import MachineError


def need_linux(what: str, why: str) -> None:
    """Raise `MachineError` on any other system: `what` needs Linux, because of `why`."""
    if sys.platform != "linux":
        raise MachineError(f"{what} needs Linux ({why}); this is {sys.platform}.", rule="system")
