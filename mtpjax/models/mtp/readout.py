"""From a draft module's hidden state to logits over the target's vocabulary, and what modules share with the trunk.

A drafter need not be able to say every token. A reduced vocabulary of Vd tokens (FR-Spec 2502.14856, EAGLE-3) makes the
output head, the dearest product of a small drafter, V / Vd times cheaper; `d2t` int32 [Vd] holds the target's id of
each of its tokens. Tokens outside have logit -inf, so their law is 0 and a rule stays lossless without knowing of it.

The tree of parameters says what there is: "d2t" a reduced vocabulary, "head" an output head of one's own; without, the
trunk's head, or the rows of it that `d2t` picks. Rows are gathered at every pass; a head of one's own is only read.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mtpjax.errors import UserError
from mtpjax.models.config import ModelConfig
from mtpjax.models.transformer import RMSNorm
from mtpjax.quant import ops

Tree = Any
"""A nested dict of parameters."""

Order = Literal["hidden_first", "embedding_first"]
Stage = Literal["before_final_norm", "after_final_norm"]


def join(order: Order, hidden: Array, embedding: Array) -> Array:
    """The two inputs of a module side by side, [..., 2D]. Families differ in the order, so it is always named."""
    return jnp.concatenate([hidden, embedding] if order == "hidden_first" else [embedding, hidden], axis=-1)


def trunk_hidden(trunk: ModelConfig, trunk_params: Tree, stage: Stage, hidden: Array, dtype: DTypeLike) -> Array:
    """The trunk's last hidden states [..., D], as given or through its final norm."""
    return jnp.asarray(final_norm(trunk, trunk_params, hidden) if stage == "after_final_norm" else hidden, dtype)


def final_norm(trunk: ModelConfig, trunk_params: Tree, hidden: Array) -> Any:
    """The trunk's final norm."""
    return RMSNorm(trunk.norm_eps).apply({"params": trunk_params["final_norm"]}, hidden)


def trunk_embedding(trunk_params: Tree, ids: Array, dtype: DTypeLike) -> Array:
    """The trunk's embedding of int ids [...]: [..., D]."""
    return ops.embed(ids, trunk_params["embed"]["weight"], dtype)


def read_out(trunk: ModelConfig, trunk_params: Tree, params: Tree, x: Array) -> Array:
    """Logits f32 [..., V] of normalised states x [..., D]; -inf for tokens that are not in the draft vocabulary."""
    shared = trunk_params["embed" if trunk.tie_embeddings else "head"]["weight"]
    d2t = params.get("d2t")
    if "head" in params:
        weight = params["head"]["weight"]
    else:
        weight = shared if d2t is None else ops.embed(d2t, shared, x.dtype)
    logits = ops.head(x, weight)
    if d2t is None:
        return logits
    empty = jnp.full((*logits.shape[:-1], trunk.vocab_size), -jnp.inf, logits.dtype)
    return empty.at[..., d2t].set(logits)


def init_readout(
    trunk: ModelConfig, key: Array, draft_vocab: int | None, own_head: bool, d2t: Sequence[int] | None
) -> Tree:
    """Random parameters of `read_out`: "head" if it has its own, "d2t" if its vocabulary is reduced.

    `d2t` are the target's ids of the draft's tokens, the first ones unless given.

    Raises:
        UserError: `d2t` is not `draft_vocab` different ids of the target.
    """
    params: dict[str, Any] = {}
    size = trunk.vocab_size if draft_vocab is None else draft_vocab
    if size > trunk.vocab_size:
        raise UserError(f"draft_vocab is {size}, expected at most the target's {trunk.vocab_size}")
    if own_head:
        params["head"] = {"weight": jax.random.normal(key, (size, trunk.d_model)) * 0.02}
    if draft_vocab is None:
        if d2t is not None:
            raise UserError("d2t was given but the config has no draft_vocab: set it to the number of ids")
        return params
    ids = np.arange(size) if d2t is None else np.asarray(d2t)
    if ids.shape != (size,) or len(set(ids.tolist())) < size or ids.min() < 0 or ids.max() >= trunk.vocab_size:
        raise UserError(f"d2t must be {size} different ids from 0 to {trunk.vocab_size - 1}, as draft_vocab says")
    return params | {"d2t": jnp.asarray(ids, jnp.int32)}
