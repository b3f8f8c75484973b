"""Learn: losses, data, one pure step, and a run that survives being killed."""

from mtpjax.training.config import CheckpointConfig, OptimizerConfig, QatConfig, TrainConfig
from mtpjax.training.data import DataConfig
from mtpjax.training.fit import TrainResult, train

__all__ = ["CheckpointConfig", "DataConfig", "OptimizerConfig", "QatConfig", "TrainConfig", "TrainResult", "train"]
