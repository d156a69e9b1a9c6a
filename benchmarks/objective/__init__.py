"""What choices of the objective do: `python -m benchmarks.objective [ratio | denominator | quorum]`; none: first two.

`ratio`, `denominator`: a small network learns a task with branches of different lengths, off-policy, under each value
of `objective.ratio` and `objective.denominator`; ± is the deviation over seeds, of differences the standard error.
`quorum --data FOLDER …`: advantages of recorded groups under a quorum against those of whole groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

TOYS = ("ratio", "denominator")


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.objective", description=__doc__)
    parts = parser.add_subparsers(dest="what", required=True)
    quorum = parts.add_parser("quorum")
    quorum.add_argument("--data", type=Path, nargs="+", required=True, help="data folders of finished runs")
    quorum.add_argument("--quorum", type=int, nargs="+", default=[4, 5, 6, 7])
    for name in TOYS:
        options = parts.add_parser(name)
        options.add_argument("--seeds", type=int, default=20, help="2 or more")
        options.add_argument("--batches", type=int, default=20, help="each is sampled by one version")
        options.add_argument("--steps", type=int, default=4, help="optimizer steps on one batch")
        options.add_argument("--lr", type=float, nargs="+", default=[3e-3, 1e-2])
    for given in [arguments] if arguments else [[toy] for toy in TOYS]:
        chosen = parser.parse_args(given)
        if chosen.what == "quorum":
            from benchmarks.objective import quorum as recorded

            recorded.report(chosen.data, chosen.quorum)
        else:
            from benchmarks.objective import options as small

            if chosen.seeds < 2:
                parser.error("--seeds: a deviation needs 2 or more")
            small.report(chosen.what, chosen.seeds, chosen.batches, chosen.steps, chosen.lr)
