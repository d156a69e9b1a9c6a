"""Discrete events over `gyre.scheduling`: the policies that drive cells, run on workloads of any size on one core."""

from gyre.simulation.bound import lower_bound
from gyre.simulation.engine import simulate
from gyre.simulation.model import CostModel, Scenario, StepWork
from gyre.simulation.outcome import Outcome
from gyre.simulation.presets import PRESETS, Preset

__all__ = ["PRESETS", "CostModel", "Outcome", "Preset", "Scenario", "StepWork", "lower_bound", "simulate"]
