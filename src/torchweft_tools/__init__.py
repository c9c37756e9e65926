"""Tools around Weft: benches, the demo, the link lab and the dry run of CUDA.

`torchweft bench`, `demo`, `lab` and `dryrun` find them here; `import torchweft` loads none of them.
"""

import sys

from torchweft.errors import MachineError


def need_linux(what: str, why: str) -> None:
    """Raise `MachineError` on any other system: `what` cannot run there, because of `why`."""
    if sys.platform != "linux":
        raise MachineError(f"{what} needs Linux ({why}); this is {sys.platform}.", rule="system")
