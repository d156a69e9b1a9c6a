"""`python -m benchmarks.objective`: see `benchmarks.objective`."""

from benchmarks.objective import main

main()
