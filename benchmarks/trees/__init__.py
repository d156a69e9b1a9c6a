"""What a branching rollout costs to train: packed trees against branches and calls apart.

    python -m benchmarks.trees [--context N] [--tokens N] [--budget N] [--short] [--only saved|cost] [TREE ...]

`saved`: forward and backward of SmolLM2-135M on trees of agents' rollouts, in one run, as Gyre trains them (cap, each
token once, packed trees, cut to micro-batches) and as every branch and every call by itself. Lengths of a tree are
scaled down together, so that its longest branch has `--context` tokens and its branches apart have `--tokens`.
`--short`, for long contexts: the model's 30 layers are alike, so its seconds follow from those with 1 and with 3 of
them; and a branch by itself costs what a sequence of its length costs, which is measured at some lengths.

`cost`: how cost and memory grow with a tree's size, fan-out and depth, drawn into benchmarks/trees/cost.svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.trees", description=__doc__.split("\n")[0])
    parser.add_argument("--context", type=int, default=1024, help="longest branch, in tokens")
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of a tree's branches apart")
    parser.add_argument("--budget", type=int, default=8192, help="distinct tokens of a micro-batch")
    parser.add_argument("--short", action="store_true", help="fewer layers and branches are run, and the rest reckoned")
    parser.add_argument("names", nargs="*", metavar="TREE", help="of recorded/; none: all")
    parser.add_argument("--only", choices=("saved", "cost"))
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    from benchmarks.trees import cost, saved

    if given.only != "cost":
        saved.main(given.context, given.tokens, given.budget, given.names, short=given.short)
    if given.only != "saved":
        cost.main()
