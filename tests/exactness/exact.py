"""The exact layer: the law of what a rule commits, by enumeration.

Given laws p and q after every prefix of a tiny vocabulary, every outcome of one step has a probability that can be
written down: each draft x_1 .. x_D (product of q), each pattern of the D independent coins (product of the rule's
chances), and the next token (the rule's weights, normalised as the draw does). Behind the committed tokens the text
goes on with p. Summed, that is the joint law of D + 1 tokens, to be compared with the target's.

What runs is the rule's own code in f32, through `decide` and `next_weights`, as `verify` calls them: a pattern of coins
is given as uniforms below and above the chances. Probabilities are multiplied and summed in f64. The draws alone are
left to the Monte Carlo and simulated layers.

Data: N law sets at once. A node is a prefix; the laws of depth i are [N, V^i, V], a prefix being a number in base V.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.drafters import Proposal, chain
from mtpjax.decoding.verify import Chain, Rule
from mtpjax.decoding.verify.chain import decide, next_weights, proposed

KINDS = ("sampled", "stopping", "deterministic")


class Case(NamedTuple):
    """N law sets and every draft that may be made of each.

    Attributes:
        p: for i = 0 .. D, f32 [N, V^i, V].
        q: for i < D, f32 [N, V^i, V]: the law that the drafter reports.
        tokens: int32 [N, P, D], the drafts; P = V^D, or 1 if deterministic.
        chance: f64 [N, P], how often each is made.
        count: int32 [N, P], how many of its tokens are proposed.
        deterministic: whether q is one-hot at the tokens and not handed to the rule.
    """

    p: list[np.ndarray]
    q: list[np.ndarray]
    tokens: np.ndarray
    chance: np.ndarray
    count: np.ndarray
    deterministic: bool


class Outcome(NamedTuple):
    """What a rule does with a case.

    Attributes:
        joint: f64 [N, V^(D+1)], law of the text.
        accepted: f64 [N], expected number of accepted drafts.
        blocks: f64 [N, sum of V^n V over n = 0 .. D], law of (number accepted, their tokens, next token).
        tv: f64 [N], expected sum of the total variations that a lossy rule reports for what it committed.
    """

    joint: np.ndarray
    accepted: np.ndarray
    blocks: np.ndarray
    tv: np.ndarray


def random_case(rng: np.random.Generator, V: int, depth: int, sets: int, kind: str) -> Case:
    """Random laws; after each prefix they are generic or one of the corners of `node_laws`.

    `kind` is "sampled", "stopping" (the drafter may stop after any prefix, by what the prefix is) or "deterministic".
    """
    p, q = zip(*(node_laws(rng, (sets, V**i), V) for i in range(depth + 1)), strict=True)
    if kind == "deterministic":
        tokens = rng.integers(0, V, (sets, 1, depth))
        case = Case(list(p), [], tokens, np.ones((sets, 1)), np.full((sets, 1), depth), True)
        return case._replace(count=rng.integers(0, depth + 1, (sets, 1)))
    tokens = np.broadcast_to(np.array(list(product(range(V), repeat=depth))), (sets, V**depth, depth))
    count = np.full(tokens.shape[:2], depth)
    if kind == "stopping":
        for i in reversed(range(depth)):  # the earliest stop holds
            stops = rng.random((sets, V**i)) < 0.3
            count = np.where(np.take_along_axis(stops, prefix(tokens, i, V), axis=1), i, count)
    case = Case(list(p), list(q[:depth]), tokens, np.ones(tokens.shape[:2]), count, False)
    return case._replace(chance=draft_chance(case, case.q))


def node_laws(rng: np.random.Generator, shape: tuple[int, ...], V: int) -> tuple[np.ndarray, np.ndarray]:
    """Laws p and q, f32 [*shape, V]: generic, with zeros, equal, nearly equal, disjoint, one-hot p, one-hot q, both."""
    alpha = rng.choice([0.3, 1.0, 3.0], shape)[..., None]
    p, q = (rng.gamma(alpha, size=(*shape, V)) + 1e-12 for _ in range(2))
    kind = rng.integers(0, 10, shape)[..., None]
    here = rng.random((*shape, V)) < 0.5
    first = np.arange(V) == rng.integers(0, V, shape)[..., None]
    second = np.arange(V) == rng.integers(0, V, shape)[..., None]
    p = np.where((kind == 1) & ~(here | first), 0, p)
    q = np.where((kind == 2) & ~(here | first), 0, q)
    q = np.where(kind == 3, p, q)
    q = np.where(kind == 4, p * (1 + 1e-6 * rng.normal(size=p.shape)), q)
    some = (here | first) & ~np.all(here | first, axis=-1, keepdims=True)  # none where all would be taken
    p = np.where((kind == 5) & np.any(some, axis=-1, keepdims=True), np.where(some, p, 0), p)
    q = np.where((kind == 5) & np.any(some, axis=-1, keepdims=True), np.where(some, 0, q), q)
    p = np.where((kind == 6) | (kind == 8), first, p)
    q = np.where((kind == 7) | (kind == 8), second, q)
    return tuple((w / w.sum(axis=-1, keepdims=True)).astype(np.float32) for w in (p, q))


def one_set(case: Case, at: int) -> Case:
    """One of the sets, as a case."""
    here = slice(at, at + 1)
    p, q = ([law[here] for law in laws] for laws in (case.p, case.q))
    return Case(p, q, case.tokens[here], case.chance[here], case.count[here], case.deterministic)


def prefix(tokens: np.ndarray, i: int, V: int) -> np.ndarray:
    """The first i tokens [..., D] as a number in base V."""
    return tokens[..., :i] @ V ** np.arange(i - 1, -1, -1)


def draft_chance(case: Case, q: list[np.ndarray]) -> np.ndarray:
    """How often each draft is made by a drafter that draws from `q`, f64 [N, P]."""
    V, chance = case.p[0].shape[-1], np.ones(case.tokens.shape[:2])
    for i, law in enumerate(q):
        at = np.take_along_axis(normal(law), prefix(case.tokens, i, V)[..., None], axis=1)
        chance = chance * np.take_along_axis(at, case.tokens[..., i : i + 1], axis=2)[..., 0]
    return chance


def normal(law: np.ndarray) -> np.ndarray:
    """In f64, summing to 1 as f32 can't."""
    law = law.astype(np.float64)
    return law / law.sum(axis=-1, keepdims=True)


def target_law(case: Case) -> np.ndarray:
    """The joint law of D + 1 tokens under p, f64 [N, V^(D+1)]."""
    law = np.ones((len(case.chance), 1))
    for p in case.p:
        law = (law[..., None] * normal(p)).reshape(len(law), -1)
    return law


def proposal_of(case: Case) -> tuple[jax.Array, Proposal]:
    """What the rule is given, a row for each draft of each set: p f32 [N P, D + 1, V] and the proposal."""
    N, P, D = case.tokens.shape
    V = case.p[0].shape[-1]

    def along(laws: list[np.ndarray]) -> jax.Array:
        places = [np.take_along_axis(law, prefix(case.tokens, i, V)[..., None], axis=1) for i, law in enumerate(laws)]
        return jnp.asarray(np.stack(places, axis=2).reshape(N * P, len(laws), V))

    tokens = jnp.asarray(case.tokens.reshape(N * P, D), jnp.int32)
    count = jnp.asarray(case.count.reshape(N * P), jnp.int32)
    return along(case.p), Proposal(tokens, None if case.deterministic else along(case.q), count, chain(D))


@partial(jax.jit, static_argnames=("parts", "decides"))
def _enumerate(parts: Chain, p, proposal: Proposal, settings, decides: Callable):
    """Chances of the coins [R, D], number accepted under each pattern [2^D, R], weights [D + 1, R, V], tv [R, D]."""
    R, D = proposal.tokens.shape
    chance = jnp.where(proposed(proposal), parts.accept(p, proposal, settings), 0.0)
    patterns = jnp.asarray(list(product([False, True], repeat=D)))

    def settle(pattern):
        u = jnp.where(pattern[None, :], chance / 2, (1 + chance) / 2)
        return decides(parts, p, proposal, u, settings)

    weights = [next_weights(parts, p, proposal, jnp.full(R, n), settings) for n in range(D + 1)]
    tv = jnp.zeros(chance.shape) if parts.tv is None else parts.tv(p, proposal, settings)
    return chance, jax.vmap(settle)(patterns), jnp.stack(weights), jnp.where(proposed(proposal), tv, 0.0)


def outcome(rule: Rule, case: Case, decides: Callable = decide) -> Outcome:
    """The exact law of what the rule commits; `decides` stands in for `decide` where a bug is put back."""
    N, P, D = case.tokens.shape
    V = case.p[0].shape[-1]
    settings = {name: jnp.float32(value) for name, value in rule.settings.items()}
    parts = _enumerate(rule.chain, *proposal_of(case), settings, decides)
    chance, settled, weights, tv = (np.asarray(x, np.float64) for x in parts)
    assert np.all((chance >= 0) & (chance <= 1)), "a chance that is none"
    coins = np.array(list(product([False, True], repeat=D)))[:, None, :]
    pattern = np.prod(np.where(coins, chance, 1 - chance), axis=2) * case.chance.reshape(-1)  # [2^D, R]
    reached = np.zeros((N, P, D + 1))
    for n in range(D + 1):
        reached[:, :, n] = np.where(settled == n, pattern, 0).sum(axis=0).reshape(N, P)
    blocks, joint = [], np.zeros((N, V ** (D + 1)))
    for n in range(D + 1):
        total = weights[n].sum(axis=1, keepdims=True)
        following = (weights[n] / np.where(total > 0, total, 1)).reshape(N, P, V)
        block = np.zeros((N, V**n, V))
        np.add.at(block, (np.arange(N)[:, None], prefix(case.tokens, n, V)), reached[:, :, n : n + 1] * following)
        blocks.append(block.reshape(N, -1))
        law = blocks[-1]
        for p in case.p[n + 1 :]:
            law = (law[..., None] * normal(p)).reshape(N, -1)
        joint += law
    committed = reached[:, :, ::-1].cumsum(axis=2)[:, :, ::-1][:, :, :D]  # chance that each place commits a token
    return Outcome(
        joint=joint,
        accepted=(reached.sum(axis=1) * np.arange(D + 1)).sum(axis=1),
        blocks=np.concatenate(blocks, axis=1),
        tv=(committed * tv.reshape(N, P, D)).sum(axis=(1, 2)),
    )


def total_variation(law: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1/2 sum |law - other| over the last axis."""
    return 0.5 * np.abs(law - other).sum(axis=-1)


def error(rule: Rule, case: Case, decides: Callable = decide) -> float:
    """Largest total variation, over the sets, between the rule's joint law and the target's."""
    return float(total_variation(outcome(rule, case, decides).joint, target_law(case)).max())


def impossible(rule: Rule, case: Case, decides: Callable = decide) -> int:
    """How many rows commit a draft to which p gives 0 when every uniform is 0, which `jax.random.uniform` returns."""
    p, proposal = proposal_of(case)
    settings = {name: jnp.float32(value) for name, value in rule.settings.items()}
    zeros = jnp.zeros(proposal.tokens.shape)
    accepted = np.asarray(jax.jit(decides, static_argnums=0)(rule.chain, p, proposal, zeros, settings))
    p_x = np.take_along_axis(np.asarray(p)[:, :-1], np.asarray(proposal.tokens)[:, :, None], axis=2)[..., 0]
    made = case.chance.reshape(-1) > 0
    kept = np.arange(p_x.shape[1]) < accepted[:, None]
    return int(np.sum(np.any(kept & (p_x == 0), axis=1) & made))
