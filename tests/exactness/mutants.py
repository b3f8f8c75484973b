"""Known bugs, put back one by one, and the layer of the gate that sees each.

Every one has been shipped by a real system. A gate that passes one of them proves nothing, so each must fail here.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mtpjax.decoding import loop
from mtpjax.decoding.sampling import ACCEPT, RESIDUAL, probabilities, uniforms
from mtpjax.decoding.verify import BLOCK, REJECTION, Chain, Rule, chain, rejection
from mtpjax.decoding.verify.block import remainder as block_remainder
from tests.exactness import simulate
from tests.exactness.drafters import markov
from tests.exactness.exact import Case, draft_chance, error, impossible, one_set, outcome, random_case

TOLERANCE = 1e-6
CAUGHT_P = 1e-9
VERIFY_ROWS = 30_000


class Mutant(NamedTuple):
    """A bug.

    Attributes:
        name: what it does.
        layer: which layer is asked: "exact", "u = 0", "verify" (Monte Carlo) or "run" (the public loop).
        measure: puts it back and measures what the layer measures: total variation, rows, or p-value.
    """

    name: str
    layer: str
    measure: Callable[[], float]

    def caught(self, measured: float) -> bool:
        """Whether the layer fails at this measure."""
        if self.layer == "exact":
            return measured > TOLERANCE
        return measured > 0 if self.layer == "u = 0" else measured < CAUGHT_P


def case_of(kind: str = "sampled") -> Case:
    """Sixty random law sets of depth 2 on three tokens."""
    return random_case(np.random.default_rng(12), 3, 2, 60, kind)


def with_parts(rule: Rule, **parts: Callable) -> Rule:
    """The rule with some of its parts replaced."""
    return chain.chain_rule("mutant", dataclasses.replace(rule.chain, **parts))


@contextmanager
def patched(module: object, name: str, value: object) -> Iterator[None]:
    """The module with one name replaced."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def drawn_from(change: Callable[[np.ndarray], np.ndarray], rule: Rule) -> float:
    """The drafter draws from a changed q and reports the unchanged."""
    case = case_of()
    return error(rule, case._replace(chance=draft_chance(case, [change(q) for q in case.q])))


def cooler(q: np.ndarray) -> np.ndarray:
    return q**1.5 / (q**1.5).sum(axis=-1, keepdims=True)


def in_bf16(q: np.ndarray) -> np.ndarray:
    return q.astype(ml_dtypes.bfloat16).astype(np.float32)


def plain_remainder(p, proposal, accepted, settings):
    return chain.law_at(p, accepted)


def early_bonus(p, proposal, accepted, settings):
    early = jnp.where(accepted < proposal.count, accepted, jnp.maximum(accepted - 1, 0))
    wrong, right = chain.law_at(p, early), rejection.remainder(p, proposal, accepted, settings)
    return jnp.where((accepted < proposal.count)[:, None], right, wrong)


def not_strict(parts: Chain, p, proposal, u, settings):
    return parts.settle(chain.proposed(proposal) & (u <= parts.accept(p, proposal, settings)))


def anticipating(rule: Rule) -> float:
    """A draft of token 1 is thrown away and p sampled instead: (.85, .15) where p is (.7, .3)."""
    p, q = np.float32([0.7, 0.3]), np.float32([0.5, 0.5])
    laws = [np.broadcast_to(p, (1, 2**i, 2)) for i in range(2)]
    tokens = np.array([[[0], [1]]])
    case = Case(laws, [q.reshape(1, 1, 2)], tokens, np.full((1, 2), 0.5), np.array([[1, 0]]), False)
    first = outcome(rule, case).joint.reshape(2, 2).sum(axis=1)
    assert np.allclose(first, [0.85, 0.15])
    return error(rule, case)


def one_coin(key_B, count):
    return jnp.broadcast_to(uniforms(key_B, 1), (*key_B.shape, count))


def by_inverse(key_B, weight_BV, u_B):
    """Draw by the cumulative sum; what an unnormalised weight leaves over goes to the last token."""
    below = jnp.cumsum(weight_BV, axis=1) <= u_B[:, None]
    return jnp.minimum(jnp.sum(below, axis=1), weight_BV.shape[1] - 1).astype(jnp.int32)


def unnormalised_draw(key_B, weight_BV):
    return by_inverse(key_B, weight_BV, uniforms(key_B, 1)[:, 0])


def verify_gate(rule: Rule, stream: int | None = None, **patches: Callable) -> float:
    """p-value of drafts and `verify`, on a set of generic laws, with names of `verify/chain.py` replaced."""
    rng = np.random.default_rng(2)
    laws = [[rng.dirichlet(np.ones(3), (1, 3**i)).astype(np.float32) for i in range(n)] for n in (3, 2)]
    case = one_set(case_of(), 0)._replace(p=laws[0], q=laws[1])
    case = case._replace(chance=draft_chance(case, case.q))
    streams = {} if stream is None else {"stream": stream}
    if not patches:
        return simulate.verify_p_value(rule, case, VERIFY_ROWS, **streams)
    (name, value), *rest = patches.items()
    assert not rest
    with patched(chain, name, value):
        return simulate.verify_p_value(rule, case, VERIFY_ROWS, **streams)


def coin_draws_too(key_B, weight_BV):
    """The next token is drawn with the coin that judged the first place."""
    share = weight_BV / jnp.sum(weight_BV, axis=1, keepdims=True)
    return by_inverse(key_B, share, uniforms(key_B, 2)[:, 0])


def coin_for_both() -> float:
    """The residual is drawn with the coin of the first place: the streams are one, and the draw takes a uniform."""
    with patched(chain, "RESIDUAL", ACCEPT):
        return verify_gate(REJECTION, draw=coin_draws_too)


def top_p_first(logits, law):
    """Top-p on the law before the temperature, which then warms what is left."""
    untempered = law.replace(temperature=jnp.ones_like(law.temperature))
    kept = jnp.where(probabilities(logits, untempered) > 0, logits, -jnp.inf)
    return probabilities(kept, law.replace(top_p=jnp.ones_like(law.top_p)))


def unguarded(logits, law):
    """Greedy rows are treated as sampled ones at temperature 1."""
    return probabilities(logits, law.replace(temperature=jnp.where(law.greedy, 1.0, law.temperature)))


def run_gate(group: str, law: Callable | None = None, drawn: Callable = probabilities) -> float:
    """Smallest p-value of the public loop; the law that it verifies by, or that drafts are drawn from, is replaced."""
    groups = simulate.GROUPS[group]
    mutant = dataclasses.replace(REJECTION, name="mutant " + group)  # another static argument: compiled anew
    request = simulate.request_of(mutant, markov(1, drawn_from=drawn), 1, groups)
    with patched(loop, "probabilities", law or probabilities):
        found = simulate.counts(request, len(groups), rows=simulate.CALL_ROWS // len(groups))
    laws = [simulate.law_of(settings, 1) for settings in groups]
    return min(simulate.chi_square(c, wanted) for c, wanted in zip(found, laws, strict=True))


MUTANTS = [
    Mutant("rejection: q reported is not the q sampled", "exact", lambda: drawn_from(cooler, REJECTION)),
    Mutant("block: q reported is not the q sampled", "exact", lambda: drawn_from(cooler, BLOCK)),
    Mutant("draws in bf16, ratio in f32", "exact", lambda: drawn_from(in_bf16, REJECTION)),
    Mutant(
        "block: stops at the first failing coin",
        "exact",
        lambda: error(with_parts(BLOCK, settle=chain.leading), case_of()),
    ),
    Mutant(
        "rejection: keeps the last coin that falls",
        "exact",
        lambda: error(with_parts(REJECTION, settle=BLOCK.chain.settle), case_of()),
    ),
    Mutant(
        "rejection: next token from p, not the residual",
        "exact",
        lambda: error(with_parts(REJECTION, remainder=plain_remainder), case_of()),
    ),
    Mutant(
        "block: residual without the prefix's weight",
        "exact",
        lambda: error(with_parts(BLOCK, remainder=rejection.remainder), case_of()),
    ),
    Mutant(
        "rejection: residual with the block's weight",
        "exact",
        lambda: error(with_parts(REJECTION, remainder=block_remainder), case_of()),
    ),
    Mutant(
        "bonus from the place before", "exact", lambda: error(with_parts(REJECTION, remainder=early_bonus), case_of())
    ),
    Mutant("rejection: depth looks at the token being judged", "exact", lambda: anticipating(REJECTION)),
    Mutant("block: depth looks at the token being judged", "exact", lambda: anticipating(BLOCK)),
    Mutant("rejection: accepts at u <= p / q", "u = 0", lambda: impossible(REJECTION, case_of(), not_strict)),
    Mutant("block: accepts at u <= h", "u = 0", lambda: impossible(BLOCK, case_of(), not_strict)),
    Mutant("draft and residual share their noise", "verify", lambda: verify_gate(REJECTION, stream=RESIDUAL)),
    Mutant("one coin for all places", "verify", lambda: verify_gate(REJECTION, uniforms=one_coin)),
    Mutant("block: one coin for all places", "verify", lambda: verify_gate(BLOCK, uniforms=one_coin)),
    Mutant("the coin draws the residual too", "verify", coin_for_both),
    Mutant("residual not renormalised", "verify", lambda: verify_gate(REJECTION, draw=unnormalised_draw)),
    Mutant("target: top-p before temperature", "run", lambda: run_gate("top-p", law=top_p_first)),
    Mutant("draft: top-p before temperature", "run", lambda: run_gate("top-p", drawn=top_p_first)),
    Mutant("greedy rows without a guard", "run", lambda: run_gate("mixed", law=unguarded)),
]
