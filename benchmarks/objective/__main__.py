"""`python -m benchmarks.objective`: see `benchmarks.objective`."""

import sys

from benchmarks.objective import main

main(sys.argv[1:])
