"""`python -m benchmarks.gateway [PART …]`."""

import sys

from benchmarks.gateway import main

if __name__ == "__main__":
    main(sys.argv[1:])
