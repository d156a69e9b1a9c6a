"""Gyre: elastic online RL for agents whose rollouts last hours, driven by unmodified harnesses.

The library is free of Temporal. Imports run one way: workers -> activities -> gyre, workers -> workflows.
"""

__version__ = "0.1.0"
