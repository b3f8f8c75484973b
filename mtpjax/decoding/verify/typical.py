"""Lossy: typical acceptance (Medusa, Cai et al. 2401.10774), which keeps a token that is not surprising.

Keep x if p(x) > min(epsilon, delta exp(-H(p))) with H the entropy in nats: where the target is sure, little else is
kept; where it is undecided, almost anything. The output is not the target's: see `lossy.py` for what is reported.
Medusa also commits its first token greedily; here that token is the target's own draw, as after every step.
"""

import jax.numpy as jnp
from jax import Array
from jax.scipy.special import entr

from mtpjax.decoding.verify.base import Rule, Settings
from mtpjax.decoding.verify.chain import chain_rule
from mtpjax.decoding.verify.lossy import keeping, number


def keeps(p_BDV: Array, settings: Settings) -> Array:
    """Bool [B, depth, V]: p(x) > min(epsilon, delta exp(-H(p)))."""
    entropy = jnp.sum(entr(p_BDV), axis=2, keepdims=True)
    return p_BDV > jnp.minimum(settings["epsilon"], settings["delta"] * jnp.exp(-entropy))


CHAIN = keeping(keeps)


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """The rule with its two numbers, each from 0 to 1; Medusa's defaults. They are never compiled in."""
    numbers = {"epsilon": number("typical", "epsilon", epsilon, 0, 1), "delta": number("typical", "delta", delta, 0, 1)}
    return chain_rule("typical", CHAIN, numbers)
