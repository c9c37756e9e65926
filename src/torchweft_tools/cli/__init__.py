"""The tools' part of the command `torchweft`: bench, lab, dryrun, demo."""
