"""The decode loop updates the caches, of target and drafter, where they lie: no copy in the buffer assignment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding import loop
from mtpjax.decoding.adaptive import adaptive
from mtpjax.decoding.drafters import Params, ngram, none
from mtpjax.decoding.request import make_request
from mtpjax.decoding.target import target_from_model
from mtpjax.quant.policy import apply_precision
from tests.drafters import twins
from tests.learned import FAMILIES
from tests.tiny import CONFIG, tiny_model


@pytest.mark.parametrize(
    ("drafter", "precision"),
    [
        pytest.param(none(), "f32", marks=pytest.mark.slow),
        pytest.param(none(), "bf16", marks=pytest.mark.slow),
        (ngram(3), "f32"),
        pytest.param(ngram(3), "bf16", marks=pytest.mark.slow),
        (twins(2), "f32"),
        (adaptive(ngram, (1, 3)), "f32"),
        (FAMILIES["reuse"].drafter(3), "f32"),
        pytest.param(FAMILIES["eagle"].drafter(3, 2), "f32", marks=pytest.mark.slow),
        pytest.param(FAMILIES["modules"].drafter(3, 2), "f32", marks=pytest.mark.slow),
        pytest.param(FAMILIES["gloeckle"].drafter(3), "f32", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_cache_is_updated_in_place(drafter, precision):
    model, params = tiny_model()
    model = model.copy(dtype=jnp.dtype("float32" if precision == "f32" else "bfloat16"))
    target, own = target_from_model(model), None
    if drafter.params_like is not None:
        own = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), drafter.params_like())
    params = Params(apply_precision(params, precision), own)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (9, 30, 2, 60)]
    request = make_request(target, prompts, max_new_tokens=1900, drafter=drafter, drafter_params=own)
    arrays = map(jnp.asarray, (request.tokens, request.prompt_length, request.limit))
    tail = request.law, jnp.asarray(request.max_depth), {}, jnp.asarray(request.stop_ids), jnp.asarray(request.seed)

    def start(params):
        state = loop.init_state(target, drafter.memory, *arrays, *tail)
        static = {"target": target, "memory": drafter.memory, "rule": request.rule, "chunk": request.chunk}
        return loop.start_decoding(loop.prefill(params, state, **static), drafter)

    state = start(params)
    compiled = loop.decode.lower(
        params, state, jnp.int32(5), target=target, drafter=drafter, rule=request.rule
    ).compile()
    caches = [x for x in jax.tree.leaves((state.cache, state.memory)) if x.ndim == 5]
    cache_bytes = sum(x.nbytes for x in caches)
    memory = compiled.memory_analysis()
    assert cache_bytes > 1_000_000 if precision == "f32" else 500_000
    assert memory.temp_size_in_bytes < cache_bytes / 4, "a copy of the cache would be at least half of it"
    assert memory.alias_size_in_bytes >= cache_bytes, "the state that comes in is the state that goes out"
    shapes = {f"[{','.join(map(str, x.shape))}]" for x in caches}
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and any(s in line for s in shapes)]
    assert not copies
