"""One training step as a pure function: (state, batch) -> (state, metrics).

Master weights, gradients and moments are float32 throughout. With `quantise`, the forward pass sees every weight
through `fake_quant`: the FP8 values that will be deployed, with a straight-through gradient to the masters. It is a
static argument: the two kinds of step are two compiled programs of this one source, chosen by the host, and the state
is the same in both, so training may begin in one and end in the other.

`model` and `optimizer` are all that a step needs besides state and batch; nothing is looked up elsewhere. The caller
jits: `compiled_step` consumes the state that it is given, so that weights and moments are updated in place.

Rejected: a traced flag with `lax.cond` (one program, but it holds both forward passes and their buffers); quantising
inside the model (it would need to know about training).
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mtpjax.quant import fake_quant_params
from mtpjax.training.config import OptimizerConfig
from mtpjax.training.losses import cross_entropy, token_nll

type Metrics = dict[str, jax.Array]


@flax.struct.dataclass
class TrainState:
    """All that training carries from one step to the next.

    step:       int32, steps done
    params:     float32 master weights, the model's own dict
    opt_state:  optax's state
    key:        PRNG key of the run; a step that draws uses `fold_in(key, step)`, so the key itself never changes
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any


@functools.lru_cache(maxsize=16)
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW with clipping, and a learning rate that warms up linearly and then falls by a cosine until `steps`.

    Equal arguments give the same object: it is a static argument of the compiled step, which compares by identity.
    """
    warmup = min(config.warmup_steps, steps)
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.learning_rate * config.final_fraction,
    )
    adamw = optax.adamw(
        rate,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def init_state(model: Any, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The state before the first step; `model` is any Flax module that takes ids [B, T] and returns `.logits`."""
    return _init(jax.random.key(seed), model, optimizer)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _init(root: jax.Array, model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    init_key, key = jax.random.split(root)
    params = model.init(init_key, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(jnp.int32(0), params, optimizer.init(params), key)


def forward(params: Any, ids: jax.Array, *, model: Any, quantise: bool = False) -> jax.Array:
    """Logits float32 [B, T, V] of ids [B, T], with fake-quantised weights if asked for."""
    return model.apply({"params": fake_quant_params(params) if quantise else params}, ids).logits


def loss(params: Any, batch: Any, *, model: Any, quantise: bool = False) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of {"ids": [B, T], "labels": [B, T]} in nats per valid token, and how many those are."""
    return cross_entropy(forward(params, batch["ids"], model=model, quantise=quantise), batch["labels"])


def train_step(
    state: TrainState, batch: Any, *, model: Any, optimizer: optax.GradientTransformation, quantise: bool
) -> tuple[TrainState, Metrics]:
    """One step. Metrics: loss before the update, global norm of the gradient before clipping, valid tokens."""
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    (value, tokens), grads = value_and_grad(state.params, batch, model=model, quantise=quantise)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), "tokens": tokens}
    return TrainState(state.step + 1, params, opt_state, state.key), metrics


def nll_sum(params: Any, batch: Any, *, model: Any, quantise: bool = False) -> tuple[jax.Array, jax.Array]:
    """Summed negative log-likelihood in nats, and the number of valid tokens: to be added over batches."""
    nll, valid = token_nll(forward(params, batch["ids"], model=model, quantise=quantise), batch["labels"])
    return jnp.sum(nll), jnp.sum(valid)


# The boundary of compilation: one program for each shape, model, optimiser and kind of step, kept for the process.
compiled_step = jax.jit(train_step, static_argnames=("model", "optimizer", "quantise"), donate_argnames="state")
compiled_nll_sum = jax.jit(nll_sum, static_argnames=("model", "quantise"))
