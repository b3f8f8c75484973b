"""The simulated layers: many rows through the public `make_request` and `run`, or many draws of one `verify`.

The target is a table of logits over three tokens that looks two tokens back, so that the law of every output is known.
Rows of one call cycle through `groups` of settings: greedy rows stand beside sampled rows, each group is tested by
itself. One call's rows are few and calls are repeated with other seeds, which compiles nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding.drafters import Drafter, Proposal
from mtpjax.decoding.drive import run
from mtpjax.decoding.request import Request, make_request
from mtpjax.decoding.sampling import DRAFT, draw, tagged
from mtpjax.decoding.verify import Rule
from tests.exactness.drafters import V, markov
from tests.exactness.exact import Case, one_set, outcome
from tests.exactness.laws import encode, sequence_law
from tests.exactness.statistics import chi_square, rows_needed
from tests.tiny import table_logits, table_target

TABLE = table_logits(V, seed=4, spread=1.2)
PROMPT = (2, 1, 0, 1)
SLOTS, CHUNK = 24, 8
CALL_ROWS = 16_384

PLAIN = {"temperature": 1.0}
GROUPS = {
    "plain": (PLAIN,),
    "temperature": ({"temperature": 0.6}, {"temperature": 1.6}),
    "top-k": ({"temperature": 0.8, "top_k": 2},),
    "top-p": ({"temperature": 1.3, "top_p": 0.8},),
    "min-p": ({"temperature": 1.5, "min_p": 0.3},),
    "mixed": (PLAIN, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_k": 2}),
}
DRAFTERS: dict[str, Callable[[int], str | Drafter]] = {
    "ngram": lambda depth: "ngram",
    "sampled": markov,
    "deterministic": lambda depth: markov(depth, sampled=False),
    "stopping": lambda depth: markov(depth, stops=True),
}


class Combination(NamedTuple):
    """One compiled loop and what it is asked for.

    Attributes:
        rule: name in `RULES`.
        drafter: name in `DRAFTERS`.
        depth: drafted tokens a step.
        group: name in `GROUPS`; each of its settings is a test.
        stop: whether token 0 ends a row, inside a block too.
        ragged: whether rows have prompts of different lengths (with the same last tokens).
    """

    rule: str
    drafter: str
    depth: int
    group: str
    stop: bool = False
    ragged: bool = False

    @property
    def tests(self) -> int:
        """How many p-values it gives."""
        return len(GROUPS[self.group])

    def __str__(self) -> str:
        extra = ", EOS inside the block" * self.stop + ", ragged batch" * self.ragged
        return f"{self.rule} × {self.drafter}, depth {self.depth}, {self.group}{extra}"


def length_of(depth: int) -> int:
    """Tokens of an output: the target's first, one block and its bonus; blocks deeper than 3 are cut by the limit."""
    return min(depth, 3) + 2


def cells(combination: Combination) -> int:
    """Most outcomes that a test of it has."""
    return V ** length_of(combination.depth)


FAST = [
    Combination("rejection", "sampled", 2, "mixed"),
    Combination("rejection", "ngram", 2, "top-k", ragged=True),
    Combination("block", "sampled", 2, "top-p", stop=True),
    Combination("block", "sampled", 2, "min-p", ragged=True),
]
FULL = [
    Combination(rule, drafter, 2, group) for rule in ("rejection", "block") for drafter in DRAFTERS for group in GROUPS
] + [
    Combination(rule, drafter, depth, "mixed", stop=stop, ragged=True)
    for rule in ("rejection", "block")
    for drafter in DRAFTERS
    for depth, stop in ((1, False), (2, True), (3, True), (5, False))
]
FAMILY = sum(combination.tests for combination in FULL)


def samples(combination: Combination, family: int = FAMILY) -> int:
    """Rows of each test: what the stated power needs, rounded up to whole calls."""
    groups, needed = combination.tests, rows_needed(cells(combination), family)
    return -(-needed * groups // CALL_ROWS) * CALL_ROWS // groups


def request_of(rule: str | Rule, drafter: str | Drafter, depth: int, groups: Sequence[dict], **more) -> Request:
    """A request of `CALL_ROWS` rows that cycle through the groups' settings, in few slots.

    The public request rounds its shapes up to a bucket of 256 slots; the same loop in 24 is ten times as quick.
    """
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    per_row = {
        name: [groups[row % len(groups)].get(name, default) for row in range(CALL_ROWS)]
        for name, default in defaults.items()
    }
    depths = {"depth": depth} if isinstance(drafter, str) else {}
    prompts = [PROMPT] * CALL_ROWS
    if more.pop("ragged", False):
        prompts = [PROMPT[-2:] if row // len(groups) % 2 else (1, 0, *PROMPT) for row in range(CALL_ROWS)]
    request = make_request(
        table_target(V),
        prompts,
        rule=rule,
        drafter=drafter,
        max_new_tokens=length_of(depth),
        **depths,
        **per_row,
        **more,
    )
    assert request.limit.max() + request.drafter.depth + 1 <= SLOTS
    return dataclasses.replace(request, tokens=request.tokens[:, :SLOTS], chunk=CHUNK)


def outputs(request: Request, call: int) -> np.ndarray:
    """One call's outputs, int [CALL_ROWS, length], V behind the end of a row."""
    rows = np.arange(CALL_ROWS, dtype=np.uint32)
    state, _ = run(table_target(V), TABLE, dataclasses.replace(request, seed=rows + np.uint32(call * CALL_ROWS)))
    tokens, start, end = (np.asarray(x) for x in (state.tokens, state.prompt_length, state.length))
    at = start[:, None] + np.arange(int(np.max(request.limit - start)))[None, :]
    return np.where(at < end[:, None], np.take_along_axis(tokens, at, axis=1), V)


def counts(request: Request, groups: int, rows: int) -> list[np.ndarray]:
    """How often each output was given, for each group, from at least `rows` rows each."""
    calls = -(-rows * groups // CALL_ROWS)
    codes = [encode(outputs(request, call), V) for call in range(calls)]
    size = (V + 1) ** int(np.max(request.limit - request.prompt_length))
    return [np.bincount(np.concatenate([c[g::groups] for c in codes]), minlength=size) for g in range(groups)]


def p_values(combination: Combination, family: int = FAMILY) -> list[float]:
    """p-value of each group's outputs, with the rows that the stated power needs in a family of tests."""
    groups = GROUPS[combination.group]
    drafter = DRAFTERS[combination.drafter](combination.depth)
    stop = {"stop_ids": [0]} if combination.stop else {}
    request = request_of(combination.rule, drafter, combination.depth, groups, ragged=combination.ragged, **stop)
    found = counts(request, len(groups), samples(combination, family))
    return [
        chi_square(c, law_of(settings, combination.depth, **stop)) for c, settings in zip(found, groups, strict=True)
    ]


def law_of(settings: dict, depth: int, stop_ids: Sequence[int] = ()) -> np.ndarray:
    """The target's law of the outputs under these settings. All prompts end alike, and only that matters."""
    return sequence_law(np.asarray(TABLE), PROMPT, length_of(depth), stop_ids, **settings)


def verify_p_value(rule: Rule, case: Case, rows: int, stream: int = DRAFT) -> float:
    """Chi-square of draft and `verify` alone, on the first set of a case: law of (accepted, tokens, next token).

    Drafts are drawn with the drafter's stream, a row's key each; `stream` is another where a bug is put back.
    """
    V, D = case.p[0].shape[-1], case.tokens.shape[2]
    p, q = ([jnp.asarray(law[0]) for law in laws] for laws in (case.p, case.q))
    settings = {name: jnp.float32(value) for name, value in rule.settings.items()}

    @jax.jit
    def blocks(seeds):
        keys = jax.vmap(jax.random.key)(seeds)
        code, tokens, p_rows, q_rows = jnp.zeros(len(seeds), jnp.int32), [], [], []
        for i in range(D):
            p_rows.append(p[i][code])
            q_rows.append(q[i][code])
            key = tagged(tagged(keys, stream), i) if i else tagged(keys, stream)
            tokens.append(draw(key, q_rows[-1]))
            code = code * V + tokens[-1]
        p_rows.append(p[D][code])
        drafted, full = jnp.stack(tokens, axis=1), jnp.full(len(seeds), D, jnp.int32)
        proposal = Proposal(drafted, jnp.stack(q_rows, axis=1), full, tuple(range(D)))
        verdict = rule.verify(jnp.stack(p_rows, axis=1), proposal, keys, settings)
        return drafted, verdict.accepted, verdict.next_token

    drafted, accepted, following = (np.asarray(x) for x in blocks(jnp.arange(rows, dtype=jnp.uint32)))
    start = np.cumsum([0] + [V ** (n + 1) for n in range(D)])
    code = np.zeros(rows, np.int64)
    for n in range(D + 1):
        here = accepted == n
        code[here] = start[n] + (drafted[here, :n] @ V ** np.arange(n - 1, -1, -1)) * V + following[here]
    law = outcome(rule, one_set(case, 0)).blocks[0]
    return chi_square(np.bincount(code, minlength=len(law)), np.where(law < 1e-9, 0, law))
