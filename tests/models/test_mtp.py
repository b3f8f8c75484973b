"""Draft modules alone: what their configs must say, what each choice changes, and what a reduced vocabulary leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.config import replace
from mtpjax.errors import UserError
from mtpjax.models.mtp import (
    EagleConfig,
    GloeckleConfig,
    MedusaConfig,
    MTPConfig,
    eagle_stack,
    head_logits,
    init_params,
    logits_of,
    medusa_stack,
    sequential_stack,
)
from mtpjax.quant.policy import apply_precision
from tests.learned import D2T, FAMILIES
from tests.marks import slow
from tests.tiny import CONFIG, tiny_model

RNG = np.random.default_rng(0)
B, T, D = 2, 12, CONFIG.d_model
TOKENS = jnp.asarray(RNG.integers(0, CONFIG.vocab_size, (B, T)), jnp.int32)
FEATURES = tuple(jnp.asarray(RNG.normal(size=(B, T, D)) * 2, jnp.float32) for _ in range(3))
LAST = jnp.asarray([7, 3], jnp.int32)


def logits(family, features=FEATURES, tokens=TOKENS, trunk=None, params=None):
    """Logits of three drafts, [B, 3, V]."""
    trunk = tiny_model()[1] if trunk is None else trunk
    params = family.params() if params is None else params
    if hasattr(family.stack, "heads"):
        every = head_logits(family.stack, trunk, params, features[:1])
        return every[jnp.arange(B), LAST - 1]
    wanted = len(family.stack.features)
    return logits_of(family.stack, trunk, params, features[:wanted], tokens, LAST, 3)


@pytest.mark.parametrize("name", [slow("reuse"), "modules", "eagle", slow("medusa"), "gloeckle"])
def test_a_draft_sees_its_past_only(name):
    """Hidden states from the last token's place on, and tokens from the draft's own place on, change nothing."""
    family = FAMILIES[name]
    once = logits(family)
    later = jnp.arange(T)[None, :] >= LAST[:, None]
    features = tuple(jnp.where(later[:, :, None], 9.0, f) for f in FEATURES)
    np.testing.assert_array_equal(once, logits(family, features))
    tokens = jnp.where(jnp.arange(T)[None, :] > LAST[:, None] + 2, 0, TOKENS)
    np.testing.assert_array_equal(once, logits(family, tokens=tokens))
    earlier = tuple(f.at[:, 1].add(1.0) for f in FEATURES)
    assert (np.abs(once - logits(family, earlier)) > 0).any() == (name != "medusa")
    if name in ("reuse", "modules", "eagle"):
        changed = TOKENS.at[jnp.arange(B), LAST + 1].add(1) % CONFIG.vocab_size  # the first draft
        other = logits(family, tokens=changed)
        np.testing.assert_array_equal(once[:, 0], other[:, 0])
        assert not np.array_equal(once[:, 1], other[:, 1])


@pytest.mark.parametrize("field", ["order", "hidden_from"])
def test_invariant_11_the_inputs_are_said_and_each_choice_is_another_module(field):
    family = FAMILIES["modules"]
    values = {"order": "embedding_first", "hidden_from": "before_final_norm"}
    other = replace(family.config, **{field: values[field]})
    assert other != family.config
    trunk = tiny_model()[1]
    trunk = trunk | {"final_norm": {"scale": jnp.linspace(0.5, 2.0, D)}}
    once, twice = logits(family, trunk=trunk), logits(family._replace(config=other), trunk=trunk)
    assert np.max(np.abs(once - twice)) > 0.01
    complete = {"order": "hidden_first", "hidden_from": "before_final_norm"}
    with pytest.raises(UserError, match=f"{field}"):
        MTPConfig(**{name: value for name, value in complete.items() if name != field})


def test_invariant_11_holds_for_every_family():
    given = {EagleConfig: {"layers": (0, 1, 2)}, MedusaConfig: {"heads": 1}, GloeckleConfig: {"heads": 1}}
    for config, known in given.items():
        with pytest.raises(UserError, match="order|hidden_from"):
            config(**known)
    early = FAMILIES["medusa"]
    late = early._replace(config=replace(early.config, hidden_from="before_final_norm"))
    assert np.nanmax(np.abs(logits(early)[..., D2T[0]] - logits(late)[..., D2T[0]])) > 1e-3


@pytest.mark.parametrize("name", ["reuse", "eagle", "medusa"])
def test_a_reduced_vocabulary_says_nothing_else(name):
    got = np.asarray(logits(FAMILIES[name]))
    said = np.isfinite(got).all(axis=(0, 1))
    assert said.sum() == 25 and set(np.flatnonzero(said)) == set(D2T)


def test_a_reduced_vocabulary_picks_rows_of_the_shared_head():
    """The same logits as the whole head's where there are any, also from a head that is quantised."""
    whole = FAMILIES["reuse"]._replace(config=replace(FAMILIES["reuse"].config, draft_vocab=None))
    part = FAMILIES["reuse"]
    params = part.params()
    rest = {name: value for name, value in params.items() if name != "d2t"}
    for trunk in (tiny_model()[1], apply_precision(tiny_model()[1], "fp8")):
        few, every = logits(part, trunk=trunk), logits(whole, trunk=trunk, params=rest)
        np.testing.assert_allclose(few[..., D2T], every[..., D2T], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("d2t", [(1, 2), (1, 1, 2), (0, 1, 61), (-1, 0, 1)])
def test_a_map_that_is_none_is_refused(d2t):
    config = MedusaConfig(heads=1, hidden_from="after_final_norm", draft_vocab=3)
    with pytest.raises(UserError, match="3 different ids from 0 to 60"):
        init_params(CONFIG, config, d2t=d2t)


def test_configs_that_do_not_fit_are_refused():
    said = {"order": "hidden_first", "hidden_from": "before_final_norm"}
    with pytest.raises(UserError, match="depth_modules is 2"):
        sequential_stack(CONFIG, MTPConfig(**said, reuse=True, depth_modules=2))
    with pytest.raises(UserError, match="d_model is 16, expected the trunk's 48"):
        sequential_stack(CONFIG, MTPConfig(**said, block=replace(CONFIG, d_model=16)))
    with pytest.raises(UserError, match="layers from 0 to the trunk's 2"):
        eagle_stack(CONFIG, EagleConfig(layers=(0, 1, 3), order="hidden_first"))
    with pytest.raises(UserError, match="at most the target's 61"):
        init_params(CONFIG, MTPConfig(**said, draft_vocab=62))
    with pytest.raises(UserError, match="no draft_vocab"):
        init_params(CONFIG, MTPConfig(**said), d2t=[1])


def test_the_trees_hold_what_the_config_says():
    def leaves(config):
        init = medusa_stack(CONFIG, config).init
        flat = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in flat}

    base = MedusaConfig(heads=1, hidden_from="after_final_norm")
    proj = {"head_1/proj/weight": (48, 48), "head_1/proj/bias": (48,)}
    assert leaves(base) == proj | {"head_1/head/weight": (61, 48)}
    assert leaves(replace(base, own_head=False)) == proj
    assert leaves(replace(base, draft_vocab=9)) == proj | {"head_1/head/weight": (9, 48), "d2t": (9,)}
    assert leaves(replace(base, draft_vocab=9, own_head=False)) == proj | {"d2t": (9,)}
