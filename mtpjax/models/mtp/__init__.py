"""Draft modules that read the trunk's hidden states: sequential MTP, EAGLE-3's head, Medusa's and Gloeckle's heads."""

from collections.abc import Sequence

import jax

from mtpjax.models.config import ModelConfig
from mtpjax.models.mtp.eagle import EagleConfig, eagle_stack
from mtpjax.models.mtp.pairs import PairStack, logits_of
from mtpjax.models.mtp.parallel import (
    GloeckleConfig,
    HeadStack,
    MedusaConfig,
    gloeckle_stack,
    head_logits,
    medusa_stack,
)
from mtpjax.models.mtp.readout import Tree
from mtpjax.models.mtp.sequential import MTPConfig, sequential_stack

STACKS = {
    MTPConfig: sequential_stack,
    EagleConfig: eagle_stack,
    MedusaConfig: medusa_stack,
    GloeckleConfig: gloeckle_stack,
}


def init_params(
    trunk: ModelConfig,
    config: MTPConfig | EagleConfig | MedusaConfig | GloeckleConfig,
    seed: int = 0,
    d2t: Sequence[int] | None = None,
) -> Tree:
    """Random f32 parameters of a drafter's modules, as `generate`'s `drafter_params` takes them.

    Args:
        trunk: shape of the target.
        config: the family's config; the drafter must be made with the same.
        seed: of the random numbers.
        d2t: with a reduced vocabulary, the target's ids of the draft's tokens; the first ones unless given.

    Raises:
        UserError: the config does not fit the trunk, or d2t the config.
    """
    return STACKS[type(config)](trunk, config).init(jax.random.key(seed), d2t)


__all__ = [
    "STACKS",
    "EagleConfig",
    "GloeckleConfig",
    "HeadStack",
    "MTPConfig",
    "MedusaConfig",
    "PairStack",
    "eagle_stack",
    "gloeckle_stack",
    "head_logits",
    "init_params",
    "logits_of",
    "medusa_stack",
    "sequential_stack",
]
