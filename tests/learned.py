"""Learned drafters for tests: each family over the tiny target, and planted to say what a trunk says."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.config import replace
from mtpjax.decoding.drafters import Drafter, eagle, gloeckle, medusa, sequential
from mtpjax.models.mtp import STACKS, EagleConfig, GloeckleConfig, MedusaConfig, MTPConfig, init_params
from tests.tiny import CONFIG

D2T = tuple(np.random.default_rng(3).permutation(CONFIG.vocab_size)[:25].tolist())
"""A reduced vocabulary, in no order."""


class Family(NamedTuple):
    """A factory of drafters and the config of its modules."""

    make: Any
    config: Any

    def drafter(self, depth: int, candidates: int = 1, **more: Any) -> Drafter:
        return self.make(CONFIG, self.config, depth, candidates, **more)

    @property
    def stack(self) -> Any:
        return STACKS[type(self.config)](CONFIG, self.config)

    def params(self, spread: float = 6.0) -> Any:
        return _params(self.config, spread)


@lru_cache(maxsize=16)
def _params(config: Any, spread: float) -> Any:
    """Random weights, large enough that choices vary."""
    reduced = config.draft_vocab is not None
    params = init_params(CONFIG, config, seed=1, d2t=D2T if reduced else None)
    return jax.tree.map(lambda x: x * spread if x.ndim == 2 else x, params)


EMB, HID = "embedding_first", "hidden_first"
FAMILIES = {
    "reuse": Family(sequential, MTPConfig(order=EMB, hidden_from="before_final_norm", reuse=True, draft_vocab=25)),
    "modules": Family(sequential, MTPConfig(order=HID, hidden_from="after_final_norm", depth_modules=3)),
    "eagle": Family(
        eagle, EagleConfig(layers=(0, 1, 2), order=EMB, draft_vocab=25, block=replace(CONFIG, n_kv_heads=3))
    ),
    "medusa": Family(medusa, MedusaConfig(heads=3, hidden_from="after_final_norm", draft_vocab=25)),
    "gloeckle": Family(gloeckle, GloeckleConfig(heads=3, hidden_from="before_final_norm")),
}


PLANTED = replace(
    CONFIG,
    vocab_size=16,
    d_model=16,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    head_dim=8,
    d_ff=8,
    qkv_bias=True,
    tie_embeddings=False,
)
"""A trunk small enough to write by hand; see `planted_trunk`."""
STRIDE = 5
PERMUTATION = np.roll(np.eye(16, dtype=np.float32), STRIDE, axis=0)
"""P, with P e_t the next token's unit vector: what follows t is t + 5, modulo 16."""


def planted_trunk(params: Any) -> Any:
    """Of random parameters: one that says ``P e_t`` after token t, whatever came before. Its states are 4 e_t."""
    silent = jax.tree.map(jnp.zeros_like, params["layers_0"])
    silent = silent | {name: params["layers_0"][name] for name in ("attn_norm", "mlp_norm")}
    embed, head = {"weight": 4 * jnp.eye(16)}, {"weight": jnp.asarray(PERMUTATION)}
    return params | {"layers_0": silent, "embed": embed, "head": head}


def looks_at_itself(attn: Any, value: np.ndarray) -> Any:
    """Attention that sees its own place only and adds ``value @ input``: one query and key, turned by position."""
    steep = {"weight": jnp.zeros_like(attn["q"]["weight"]), "bias": jnp.full((16,), 20.0)}
    v = {"weight": jnp.asarray(value, jnp.float32), "bias": jnp.zeros(16)}
    return attn | {"q": steep, "k": steep, "v": v, "o": {"weight": jnp.eye(16)}}


def _without_mlp(tree: Any) -> Any:
    return tree | {"mlp": jax.tree.map(jnp.zeros_like, tree["mlp"])}


def planted(name: str, depth: int) -> tuple[Drafter, Any]:
    """A drafter of the planted trunk, and weights with which it says what the trunk says."""
    eye, zero = np.eye(16), np.zeros((16, 16))
    if name in ("reuse", "modules"):
        modules = depth if name == "modules" else 1
        config = MTPConfig(order=EMB, hidden_from="before_final_norm", reuse=name == "reuse", depth_modules=modules)
        params = init_params(PLANTED, config)
        for module in params.values():
            module["eh_proj"] = {"weight": jnp.asarray(np.hstack([eye, zero]), jnp.float32)}
            module["block"] = _without_mlp(module["block"] | {"attn": looks_at_itself(module["block"]["attn"], zero)})
        return sequential(PLANTED, config, depth), params
    if name == "eagle":
        config = EagleConfig(layers=(0, 0, 1), order=EMB)
        params = init_params(PLANTED, config)
        attn = looks_at_itself(params["layer"]["attn"], np.hstack([eye, -eye]))
        params["layer"] = _without_mlp(params["layer"] | {"attn": attn})
        params |= {"fc": {"weight": jnp.zeros((16, 48))}, "head": {"weight": jnp.asarray(PERMUTATION)}}
        return eagle(PLANTED, config, depth), params
    if name == "medusa":
        config = MedusaConfig(heads=depth, hidden_from="after_final_norm")
        silent = {"weight": jnp.zeros((16, 16)), "bias": jnp.zeros(16)}
        params = {f"head_{k}": {"proj": silent, "head": {"weight": _power(k + 1)}} for k in range(1, depth + 1)}
        return medusa(PLANTED, config, depth), params
    config = GloeckleConfig(heads=depth, hidden_from="before_final_norm")
    params = init_params(PLANTED, config)
    for k in range(1, depth + 1):
        block = params[f"block_{k}"]
        attn = looks_at_itself(block["attn"], np.asarray(_power(k)) - eye)
        params[f"block_{k}"] = _without_mlp(block | {"attn": attn})
    return gloeckle(PLANTED, config, depth), params


def _power(k: int) -> jax.Array:
    return jnp.asarray(np.linalg.matrix_power(PERMUTATION, k))
