"""The command `torchweft`; see `app`."""
