"""The exact layer for trees: the joint law of what the recursive residual commits, by enumeration.

Every draft of every node, times every pattern of the nodes' coins, is a row that goes through the code that runs
(`walk` with `choose_recursively`): the coins are given by the pattern, and each row's probability is the product of the
chances that were asked for on its way. Behind the committed tokens the text goes on with p, as in `exact.py`.

Data: N law sets at once; laws after each prefix of i tokens are [N, V^i, V], a prefix being a number in base V.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import tree
from mtpjax.decoding.drafters import Proposal
from mtpjax.decoding.verify.tree import choose_recursively, walk
from tests.exactness.exact import node_laws, normal, total_variation

KINDS = ("independent", "distinct", "deterministic")


def error(parents: tree.Parents, V: int, sets: int, kind: str, seed: int = 0, mutate=None) -> float:
    """Largest total variation, over random law sets, between the committed joint law and the target's.

    `mutate` changes the proposal that the rule is given: a bug put back.
    """
    rng = np.random.default_rng([seed, V, len(parents), KINDS.index(kind)])
    depth = tree.depth_of(parents)
    p, q = zip(*(node_laws(rng, (sets, V**i), V) for i in range(depth + 1)), strict=True)
    count = rng.integers(0, len(parents) + 1, sets) if kind != "independent" else np.full(sets, len(parents))
    tokens = np.array(list(product(range(V), repeat=len(parents))))
    if kind == "deterministic":
        tokens = tokens[rng.integers(0, len(tokens), 1)]
    codes = node_codes(tokens, parents, V)
    levels = tree.levels(parents)
    p_rows = np.stack([p[levels[w]][:, codes[w]] for w in range(len(parents) + 1)], axis=2)  # [N, P, W, V]
    q_rows = np.stack([q[levels[w] - 1][:, codes[parents[w - 1]]] for w in range(1, len(parents) + 1)], axis=2)
    chance = draft_chance(q_rows, tokens, parents, kind)
    coins = np.array(list(product([False, True], repeat=len(parents))))
    total = np.zeros((sets, V ** (depth + 1)))
    for n in range(sets):
        P, C = len(tokens), len(coins)
        proposal = Proposal(
            jnp.asarray(np.repeat(tokens, C, axis=0), jnp.int32),
            None if kind == "deterministic" else jnp.asarray(np.repeat(q_rows[n], C, axis=0)),
            jnp.full(P * C, int(count[n]), jnp.int32),
            parents,
            kind == "distinct",
        )
        p_n = jnp.asarray(np.repeat(p_rows[n], C, axis=0))
        proposal = proposal if mutate is None else mutate(proposal)
        end, chances = _walk(p_n, proposal, jnp.asarray(np.tile(coins, (P, 1))))
        path, accepted, weights = (np.asarray(x) for x in (end.path, end.accepted, end.weights))
        weight = np.prod(np.asarray(chances, np.float64), axis=0) * np.repeat(chance[n], C)
        following = normal(np.where(weights.sum(axis=1, keepdims=True) > 0, weights, 1))
        for level in range(depth + 1):
            here = (accepted == level) & (weight > 0)
            said = np.repeat(tokens, C, axis=0)[here]
            code = np.zeros(len(said), np.int64)
            for i in range(level):
                code = code * V + np.take_along_axis(said, path[here, i : i + 1] - 1, axis=1)[:, 0]
            block = np.zeros((V**level, V))
            np.add.at(block, code, weight[here, None] * following[here])
            law = block.reshape(-1)
            for laws in p[level + 1 :]:
                law = (law[:, None] * normal(laws[n])).reshape(-1)
            total[n] += law
    wanted = np.ones((sets, 1))
    for laws in p:
        wanted = (wanted[..., None] * normal(laws)).reshape(sets, -1)
    return float(total_variation(total, wanted).max())


@jax.jit
def _walk(p, proposal: Proposal, coins):
    """The walk with given coins, and the factors of each row's probability [asked + 1, R].

    A coin that was not asked for has two values with one outcome: a half each.
    """
    factors, unasked = [], jnp.full(coins.shape[0], coins.shape[1])

    def falls(kid, chance, asked):
        coin = jnp.take_along_axis(coins, jnp.maximum(kid - 1, 0)[:, None], axis=1)[:, 0]
        nonlocal unasked
        unasked = unasked - asked
        factors.append(jnp.where(asked, jnp.where(coin, chance, 1 - chance), 1.0))
        return coin

    end = walk(proposal, choose_recursively(proposal, p, falls))
    return end, jnp.stack([*factors, 0.5**unasked])


def node_codes(tokens: np.ndarray, parents: tree.Parents, V: int) -> list[np.ndarray]:
    """For each offset the text down to it as a number in base V, int [P]."""
    codes = [np.zeros(len(tokens), np.int64)]
    for k, parent in enumerate(parents):
        codes.append(codes[parent] * V + tokens[:, k])
    return codes


def draft_chance(q_rows: np.ndarray, tokens: np.ndarray, parents: tree.Parents, kind: str) -> np.ndarray:
    """How often each draft is made, f64 [N, P]; drawn without replacement, an empty remainder gives token 0."""
    N, P, _, V = q_rows.shape
    if kind == "deterministic":
        return np.ones((N, P))
    chance = np.ones((N, P))
    for k, parent in enumerate(parents):
        q = normal(q_rows[:, :, k])
        if kind == "distinct":
            earlier = [j for j in range(k) if parents[j] == parent]
            for j in earlier:
                q = np.where(np.arange(V) == tokens[None, :, j, None], 0, q)
            left = q.sum(axis=2, keepdims=True)
            q = np.where(left > 0, q / np.where(left > 0, left, 1), np.arange(V) == 0)
        chance = chance * np.take_along_axis(q, np.broadcast_to(tokens[None, :, k, None], (N, P, 1)), axis=2)[..., 0]
    return chance
