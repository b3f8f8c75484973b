"""EAGLE-3's head as a drafter (2503.01840).

The head is `mtpjax.models.mtp.eagle`, how it drafts `mtpjax.decoding.drafters.pairs`: one module over pairs, reused.
"""

from mtpjax.decoding.drafters.base import Drafter
from mtpjax.decoding.drafters.pairs import pair_drafter
from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp import EagleConfig, eagle_stack


def eagle(
    trunk: ModelConfig,
    config: EagleConfig,
    depth: int = 3,
    candidates: int = 1,
    sample: bool = True,
    dtype: str = "float32",
) -> Drafter:
    """A drafter of an EAGLE-3 head; see `sequential` for the arguments and errors, here at any depth."""
    return pair_drafter("eagle", eagle_stack(trunk, config, dtype), depth, candidates, sample)
