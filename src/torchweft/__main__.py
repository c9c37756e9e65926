"""`python -m torchweft`: the same as the command `torchweft`."""

from torchweft_tools.cli.app import main

if __name__ == "__main__":
    main()
