"""A run small enough for a test: two compilations of a second each, then milliseconds."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from mtpjax.models.config import ModelConfig
from mtpjax.training import CheckpointConfig, DataConfig, OptimizerConfig, QatConfig, TrainConfig, TrainResult, train

MODEL = ModelConfig(
    vocab_size=257, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=24, max_context=64
)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} green bottles standing on the wall. " for n in range(200)))
    return path


@pytest.fixture(scope="session")
def config(text) -> TrainConfig:
    return TrainConfig(
        seed=5,
        steps=9,
        log_every=2,
        model=MODEL,
        data=DataConfig(text_files=(str(text),), sequence_length=16, batch_size=4, validation_windows=6),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        qat=QatConfig(from_step=4),
        checkpoint=CheckpointConfig(every=3),
    )


@dataclass
class Finished:
    folder: Path
    result: TrainResult


@pytest.fixture(scope="session")
def finished(config, tmp_path_factory) -> Finished:
    """The run of `config`, never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    return Finished(folder, train(config, run_dir=folder, progress=False))
