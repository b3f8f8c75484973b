"""What a training run is: its model, text, optimiser, quantisation and checkpoints."""

from typing import Annotated

from pydantic import Field, model_validator

from mtpjax.config import Config
from mtpjax.models.config import ModelConfig
from mtpjax.training.data import VOCABULARY, DataConfig

type Positive = Annotated[int, Field(gt=0)]
type NotNegative = Annotated[int, Field(ge=0)]
type Fraction = Annotated[float, Field(ge=0, le=1)]


class OptimizerConfig(Config):
    """AdamW with linear warm-up and cosine decay, its gradients clipped by their global norm."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """The highest learning rate, reached after the warm-up."""
    warmup_steps: NotNegative = 20
    final_fraction: Fraction = 0.1
    """The learning rate of the last step, as a fraction of the highest."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled, on matrices only."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    clip_norm: Annotated[float, Field(gt=0)] = 1.0


class QatConfig(Config):
    """Quantisation-aware training: FP8 weights emulated in the forward pass (see `mtpjax.quant.fake_quant`)."""

    from_step: NotNegative | None = None
    """The number of steps after which fake quantisation begins; null: never."""


class CheckpointConfig(Config):
    """When the whole state is saved. The last step and an interruption are always saved."""

    every: Positive = 50
    """Steps from one checkpoint to the next."""
    keep: Positive = 2
    """How many of the newest stay."""


class TrainConfig(Config):
    """One training run."""

    seed: NotNegative = 0
    """Of the initial weights and of the order of the data."""
    steps: NotNegative = 200
    log_every: Positive = 10
    """Steps from one reading of the loss to the next: the only time that the host waits for the device."""
    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    qat: QatConfig = QatConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _fits(self) -> "TrainConfig":
        model = self.model
        sizes = ("d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_context")
        for name in sizes:
            if getattr(model, name) < 1:
                raise ValueError(f"model.{name} is {getattr(model, name)}: expected 1 or more")
        if model.n_heads % model.n_kv_heads:
            raise ValueError(f"model.n_heads ({model.n_heads}) must be a multiple of model.n_kv_heads")
        if model.head_dim % 2:
            raise ValueError(f"model.head_dim ({model.head_dim}) must be even: rotary embedding turns pairs")
        if model.vocab_size < VOCABULARY:
            raise ValueError(
                f"model.vocab_size is {model.vocab_size}: the byte-level text needs {VOCABULARY} (256 bytes, separator)"
            )
        if self.data.sequence_length > model.max_context:
            raise ValueError(
                f"data.sequence_length ({self.data.sequence_length}) exceeds model.max_context ({model.max_context})"
            )
        return self
