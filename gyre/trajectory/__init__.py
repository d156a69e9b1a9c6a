"""The trajectory processor: classify, bound, deduplicate and pack a rollout's tree. No database, no torch."""

from gyre.trajectory.cut import SamplePath, micro_batches
from gyre.trajectory.process import BranchSample, select, target_mask
from gyre.trajectory.tree import KIND_RANK, Branch, Node, Tree, TreeError

__all__ = [
    "KIND_RANK",
    "Branch",
    "BranchSample",
    "Node",
    "SamplePath",
    "Tree",
    "TreeError",
    "micro_batches",
    "select",
    "target_mask",
]
