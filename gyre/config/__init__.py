"""The run file: pydantic models of one TOML file, the single place where a default lives."""

from gyre.config.load import ConfigError, load_run_config
from gyre.config.run import (
    CellConfig,
    CheckpointConfig,
    EvaluationConfig,
    HarnessConfig,
    LayoutConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PolicyConfig,
    RetentionConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SchedulingConfig,
    ServingConfig,
    StackConfig,
    TasksConfig,
    TrainerConfig,
)

__all__ = [
    "CellConfig",
    "CheckpointConfig",
    "ConfigError",
    "EvaluationConfig",
    "HarnessConfig",
    "LayoutConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RetentionConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SchedulingConfig",
    "ServingConfig",
    "StackConfig",
    "TasksConfig",
    "TrainerConfig",
    "load_run_config",
]
