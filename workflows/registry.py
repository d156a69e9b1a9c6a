"""Every workflow, for workers and replay."""

from __future__ import annotations

from workflows.cell import Cell
from workflows.evaluation import Evaluation
from workflows.rollout import Rollout
from workflows.run import TrainingRun
from workflows.scheduler import ElasticScheduler
from workflows.step import TrainingStep

WORKFLOWS = [TrainingRun, TrainingStep, Rollout, ElasticScheduler, Cell, Evaluation]
