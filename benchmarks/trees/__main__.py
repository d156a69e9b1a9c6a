"""`python -m benchmarks.trees`: see `benchmarks.trees`."""

import sys

from benchmarks.trees import main

main(sys.argv[1:])
