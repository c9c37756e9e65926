"""The link lab: runs a command over a link of a chosen rate, and returns its exit code.

    with lab.spawn_ranks([sys.executable, "script.py"], link="1gbit") as ranks:
        for line in ranks.stdout:       # what rank 0 prints
            ...
        code = ranks.wait()

With half duplex, all ranks share one network namespace, whose loopback is the link; both directions
share the rate. With full duplex, two namespaces (sides) are joined; each direction has the rate.

      half:  [ rank 0  rank 1 ]          full:  [ rank 0 ]--->[ rank 1 ]
              `- lo, rate R -'                          <---      each R

No root is needed. Where the kernel or a missing tool forbids it, the command runs over plain
loopback, and `label` says so.
"""

from torchweft_tools.lab.command import Command, check, run, spawn_ranks, start
from torchweft_tools.lab.link import LabLink
from torchweft_tools.lab.rate import is_limited, set_rate

__all__ = ["Command", "LabLink", "check", "is_limited", "run", "set_rate", "spawn_ranks", "start"]
