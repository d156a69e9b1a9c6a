from __future__ import annotations

import sys

from benchmarks.transfer import SIZES_MB, main

if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or SIZES_MB)
