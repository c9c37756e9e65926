"""Weft's own plans on a device, steady calls behind the mark, as the self-test has them."""

import sys

from torchweft_tools.selftest.recorded import main

main(sys.argv[1])
