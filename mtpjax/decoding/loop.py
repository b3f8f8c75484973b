"""The way of a token: prefill -> loop { draft -> score -> verify -> commit -> settle }, compiled whole.

Two jitted functions carry a `DecodeState`. `prefill` runs the prompts through the target in chunks, tells the drafter's
memory, and commits the first token; `decode` is one `lax.while_loop` whose body is `step`. A call to `decode` may run
to the end or for a few steps, so streaming is the same loop. Every stage is a pure function that can be called alone,
outside jit.

State between steps: a row has emitted tokens up to `length`; all but the last are in the cache, so
``cache length == length - 1``. A step drafts a chain of `depth` tokens or a tree, scores the window [last token,
drafts] in one target pass, accepts a path from the root, adds the target's own token and moves `length` on. Of a tree,
the path's keys and values are moved together. Rejected drafts stay in the cache behind `length` as stale slots that no
query sees. Plain decoding is the same step with a window of one.

Ragged rows: each row has its own length, position, limit, key and settings. A finished row goes through the passes with
its batch-mates but commits nothing and stays as it is.

Rejected: a host loop (a synchronisation per token); a loop per drafter; a copy of the cache for rolling back.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from mtpjax.decoding import adaptive
from mtpjax.decoding.adaptive import Adaptive, Pace
from mtpjax.decoding.counters import Counters, count, zero_counters
from mtpjax.decoding.drafters.base import Committed, Drafter, Memory, Params, Proposal, State, append
from mtpjax.decoding.sampling import Law, probabilities, step_keys
from mtpjax.decoding.target import Cache, Target
from mtpjax.decoding.tree import ancestor_mask, chain, is_chain, level_ends, levels
from mtpjax.decoding.verify.base import Rule, Settings, Verdict
from mtpjax.decoding.verify.greedy import verify_choice
from mtpjax.records import Leaf

RUNNING, STOPPED, FULL = range(3)


class DecodeState(struct.PyTreeNode):
    """The carry of the loop.

    Attributes:
        tokens: int32 [B, S], prompt and output.
        length: int32 [B], tokens so far; the last is not yet in the cache.
        prompt_length: int32 [B].
        limit: int32 [B], the largest `length` allowed: prompt + max_new_tokens, or the context.
        status: int32 [B], `RUNNING`, `STOPPED` (a stop id) or `FULL` (the limit).
        drafted: bool [B, S], which tokens are accepted drafts; the others are the target's own.
        logprobs: f32 [B, S], log-probability of each emitted token under the target's law before temperature and cuts,
            nats; None where not asked for.
        cache: the target's cache; committed length is ``length - 1`` after prefill.
        memory: the drafter's memory of the text.
        law: sampling settings [B].
        max_depth: int32 [B], the deepest draft of each row.
        rule_settings: the acceptance rule's numbers, f32 scalars by name.
        stop_ids: int32 [n], padded with -1.
        key: typed PRNG keys [B].
        counters: acceptance counters; None before `start_decoding`.
        pace: what adaptive depth has seen; None without.
    """

    tokens: Leaf
    length: Leaf
    prompt_length: Leaf
    limit: Leaf
    status: Leaf
    drafted: Leaf
    logprobs: Leaf | None
    cache: Cache
    memory: State
    law: Law
    max_depth: Leaf
    rule_settings: Settings
    stop_ids: Leaf
    key: Leaf
    counters: Counters | None
    pace: Pace | None = None


def init_state(
    target: Target,
    memory: Memory,
    tokens_BS: Array,
    prompt_length_B: Array,
    limit_B: Array,
    law: Law,
    max_depth_B: Array,
    rule_settings: Settings,
    stop_ids: Array,
    seed_B: Array,
    logprobs: bool = False,
) -> DecodeState:
    """The state before prefill, from prompts in `tokens` int32 [B, S] (padded with anything).

    No two leaves share a buffer, since the loops are given the state to overwrite.
    """
    B, S = tokens_BS.shape
    return DecodeState(
        tokens=tokens_BS,
        length=jnp.array(prompt_length_B, copy=True),
        prompt_length=prompt_length_B,
        limit=limit_B,
        status=jnp.where(limit_B > prompt_length_B, RUNNING, FULL).astype(jnp.int32),
        drafted=jnp.zeros((B, S), bool),
        logprobs=jnp.zeros((B, S), jnp.float32) if logprobs else None,
        cache=target.init_cache(B, S),
        memory=memory.init(B, S),
        law=law,
        max_depth=max_depth_B,
        rule_settings=rule_settings,
        stop_ids=stop_ids,
        key=jax.vmap(jax.random.key)(seed_B),
        counters=None,
    )


@partial(jax.jit, static_argnames=("target", "memory", "rule", "chunk"), donate_argnames="state")
def prefill(
    params: Params, state: DecodeState, *, target: Target, memory: Memory, rule: Rule, chunk: int
) -> DecodeState:
    """Run the prompts through the target, `chunk` tokens a pass, and commit each row's first token.

    The head is applied to each row's last prompt token only. S must be a multiple of `chunk`. A row shorter than the
    longest prompt writes padding behind its end, where no query looks. The memory is told each chunk with the hidden
    states of the places before, and then the first token.
    """
    prompt, last = state.prompt_length, state.prompt_length - 1

    def run_chunk(i: Array, carry: tuple) -> tuple:
        cache, kept, logits, before, at_last = carry
        start = i * chunk
        ids = lax.dynamic_slice_in_dim(state.tokens, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + jnp.arange(chunk)[None, :], ids.shape)
        at = jnp.clip(last - start, 0, chunk - 1)[:, None]
        cache = target.set_length(cache, jnp.full_like(prompt, start))
        new, features, cache = target.forward(params.target, ids, cache, positions, None, at, memory.features)
        predicted = tuple(jnp.concatenate([b, f[:, :-1]], axis=1) for b, f in zip(before, features, strict=True))
        kept = memory.update(params, kept, Committed(ids, jnp.clip(prompt - start, 0, chunk)), predicted)
        here = ((last >= start) & (last < start + chunk))[:, None, None]
        ends = tuple(jnp.take_along_axis(f, at[:, :, None], axis=1) for f in features)
        at_last = tuple(jnp.where(here, new_end, old) for new_end, old in zip(ends, at_last, strict=True))
        return cache, kept, jnp.where(here, new, logits), tuple(f[:, -1:] for f in features), at_last

    logits, empty = _nothing_yet(params, state, target, memory, chunk)
    chunks = (jnp.max(prompt) + chunk - 1) // chunk
    carry = (state.cache, state.memory, logits, empty, empty)
    cache, kept, logits, _, at_last = lax.fori_loop(0, chunks, run_chunk, carry)
    state = state.replace(cache=target.set_length(cache, prompt))
    nothing = Proposal(jnp.zeros((prompt.shape[0], 0), jnp.int32), None, jnp.zeros_like(prompt), ())
    state = commit(state, nothing, verify(target, rule, state, nothing, logits))
    first = Committed(_window(state, prompt, 1), state.length - prompt)
    return state.replace(memory=memory.update(params, kept, first, at_last))


def _nothing_yet(params: Params, state: DecodeState, target: Target, memory: Memory, chunk: int):
    """Zeros in the shapes of one place's logits and features."""
    B = state.prompt_length.shape[0]
    ids, at = jnp.zeros((B, chunk), jnp.int32), jnp.zeros((B, 1), jnp.int32)
    shapes = jax.eval_shape(
        lambda p, c: target.forward(p, ids, c, ids, None, at, memory.features), params.target, state.cache
    )
    logits, features, _ = shapes
    return jnp.zeros(logits.shape, logits.dtype), tuple(jnp.zeros((B, 1, f.shape[2]), f.dtype) for f in features)


def start_decoding(state: DecodeState, drafter: Drafter | Adaptive) -> DecodeState:
    """The state after prefill, with its counters at zero and, for adaptive depth, nothing seen."""
    B = state.length.shape[0]
    pace = adaptive.begin(drafter, B) if isinstance(drafter, Adaptive) else None
    return state.replace(counters=zero_counters(B, drafter.depth), pace=pace)


@partial(jax.jit, static_argnames=("target", "drafter", "rule"), donate_argnames="state")
def decode(
    params: Params, state: DecodeState, max_steps: Array, *, target: Target, drafter: Drafter | Adaptive, rule: Rule
) -> DecodeState:
    """Step until every row has finished, or `max_steps` times (int32 scalar, not compiled in)."""

    def unfinished(carry: "Carry") -> Array:
        steps, state = carry
        return (steps < max_steps) & jnp.any(state.status == RUNNING)

    static = {"target": target, "rule": rule}
    if isinstance(drafter, Adaptive):
        body = partial(_at_each_width, params, unfinished=unfinished, drafter=drafter, **static)
    else:
        body = partial(_advance, params, drafter=drafter, **static)
    return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]


Carry = tuple[Array, DecodeState]
"""Steps done, and the state."""


def _advance(params: Params, carry: Carry, *, target: Target, drafter: Drafter, rule: Rule) -> Carry:
    steps, state = carry
    return steps + 1, step(params, state, target=target, drafter=drafter, rule=rule)


def _at_each_width(
    params: Params, carry: Carry, *, unfinished: Callable, target: Target, drafter: Adaptive, rule: Rule
) -> Carry:
    """Run each width as long as it is the one that the most demanding row asks for.

    A loop that may run no time at all stands for a branch: `lax.switch` copies the cache on its way in and out.
    """
    for place, each in enumerate(drafter.drafters):

        def wanted(carry: Carry, place: int = place) -> Array:
            state = carry[1]
            widest = jnp.max(jnp.where(state.status == RUNNING, adaptive.choose(_pace(state), drafter.depths), 0))
            return unfinished(carry) & (widest == place)

        def body(carry: Carry, each: Drafter = each) -> Carry:
            steps, state = carry
            return steps + 1, paced_step(params, state, each, target=target, pace_of=drafter, rule=rule)

        carry = lax.while_loop(wanted, body, carry)
    return carry


def paced_step(
    params: Params, state: DecodeState, drafter: Drafter, *, target: Target, pace_of: Adaptive, rule: Rule
) -> DecodeState:
    """One round at a width; rows that chose less propose less, and each learns from its own outcome."""
    chosen = adaptive.choose(_pace(state), pace_of.depths)
    own = jnp.minimum(jnp.asarray(pace_of.depths)[chosen], state.max_depth)
    window = jnp.where(state.status == RUNNING, jnp.clip(state.limit - state.length - 1, 0, own), 0)
    before, cap = state.length, state.max_depth
    state = step(params, state.replace(max_depth=own), target=target, drafter=drafter, rule=rule)
    accepted = jnp.maximum(state.length - before - 1, 0)
    return state.replace(max_depth=cap, pace=adaptive.learn(_pace(state), window, accepted))


def _pace(state: DecodeState) -> Pace:
    assert state.pace is not None, "start_decoding gives a state its pace"
    return state.pace


def step(params: Params, state: DecodeState, *, target: Target, drafter: Drafter, rule: Rule) -> DecodeState:
    """One round of all stages for all rows."""
    proposal, state = draft(params, state, drafter)
    logits, features, cache = score(params, state, proposal, target, drafter.memory.features)
    verdict = verify(target, rule, state, proposal, logits)
    before = state.length
    state = commit(state.replace(cache=cache), proposal, verdict)
    return settle(params, state, before, verdict, features, target, drafter)


def draft(params: Params, state: DecodeState, drafter: Drafter) -> tuple[Proposal, DecodeState]:
    """Ask the drafter; a row that has finished, or has no room to emit them all, proposes less."""
    keys = step_keys(state.key, state.length - state.prompt_length)
    proposal, memory = drafter.propose(params, state.memory, keys, state.law)
    check_proposal(proposal, drafter, state.length.shape[0])
    room = jnp.where(state.status == RUNNING, jnp.minimum(state.limit - state.length - 1, state.max_depth), 0)
    most = jnp.asarray(level_ends(drafter.shape))[jnp.clip(room, 0, drafter.depth)]
    return proposal.replace(count=jnp.clip(proposal.count, 0, most)), state.replace(memory=memory)


def check_proposal(proposal: Proposal, drafter: Drafter, batch: int) -> None:
    """ValueError, at compile time, for a proposal that is not in the shape the drafter declares."""
    wanted = (batch, len(drafter.shape))
    if proposal.parents != drafter.shape or proposal.tokens.shape != wanted or proposal.count.shape != (batch,):
        raise ValueError(
            f"drafter {drafter.name!r} proposed tokens {proposal.tokens.shape}, count {proposal.count.shape} and "
            f"parents {proposal.parents}, expected {wanted}, {(batch,)} and {drafter.shape}"
        )
    if proposal.q is not None and proposal.q.shape[:2] != wanted:
        raise ValueError(f"drafter {drafter.name!r} gave q {proposal.q.shape}, expected a law for each of {wanted}")


def score(params: Params, state: DecodeState, proposal: Proposal, target: Target, features: tuple[int, ...]):
    """One target pass over [last token, drafts]: logits f32 [B, W, V], features, cache. A node sees its ancestors."""
    last = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    window = jnp.concatenate([last, proposal.tokens], axis=1)
    positions = state.length[:, None] - 1 + jnp.asarray(levels(proposal.parents))[None, :]
    mask = None if is_chain(proposal.parents) else jnp.asarray(ancestor_mask(proposal.parents))
    return target.forward(params.target, window, state.cache, positions, mask, None, features)


def _window(state: DecodeState, start_B: Array, width: int) -> Array:
    """The `width` tokens of each row from `start` on, int32 [B, width]; past the end, whatever lies there."""
    places = start_B[:, None] + jnp.arange(width)[None, :]
    return jnp.take_along_axis(state.tokens, jnp.minimum(places, state.tokens.shape[1] - 1), axis=1)


def verify(target: Target, rule: Rule, state: DecodeState, proposal: Proposal, logits_BWV: Array) -> Verdict:
    """Apply the rule to the processed laws; when every row is greedy, arg-max comparison is the same and cheaper.

    A rule that cannot sample is never given a row that does (`make_request`), so no law is made for it at all.
    """
    if proposal.q is not None and proposal.q.shape[2] != target.vocab_size:
        raise ValueError(f"q is a law over {proposal.q.shape[2]} tokens, but the target's is over {target.vocab_size}")
    real = jnp.broadcast_to(jnp.arange(target.vocab_size) < target.emit_vocab, logits_BWV.shape)
    logits_BWV = jnp.where(real, logits_BWV, -jnp.inf)
    keys = step_keys(state.key, state.length - state.prompt_length)

    def choose() -> Verdict:
        verdict = verify_choice(jnp.argmax(logits_BWV, axis=-1).astype(jnp.int32), proposal)
        return verdict if rule.lossless else verdict.replace(tv=jnp.zeros(verdict.path.shape))

    def judge() -> Verdict:
        return rule.verify(probabilities(logits_BWV, state.law), proposal, keys, state.rule_settings)

    verdict = lax.cond(jnp.all(state.law.greedy), choose, judge) if rule.samples else choose()
    if state.logprobs is None:
        return verdict
    tokens, places = committed_tokens(proposal, verdict), _from_root(verdict.path)
    log_p = logits_BWV - jax.nn.logsumexp(logits_BWV, axis=-1, keepdims=True)
    return verdict.replace(logprob=log_p[jnp.arange(tokens.shape[0])[:, None], places, tokens])


def committed_tokens(proposal: Proposal, verdict: Verdict) -> Array:
    """The accepted tokens and the target's own behind them, int32 [B, depth + 1]; meaningless behind that."""
    B, depth = verdict.path.shape
    drafts = jnp.take_along_axis(proposal.tokens, jnp.maximum(verdict.path - 1, 0), axis=1) if depth else verdict.path
    padded = jnp.concatenate([drafts, jnp.zeros((B, 1), jnp.int32)], axis=1)
    return jnp.where(jnp.arange(depth + 1)[None, :] < verdict.accepted[:, None], padded, verdict.next_token[:, None])


def _from_root(path_BD: Array) -> Array:
    """Offsets [B, depth + 1] of the places that predicted the tokens of a path: the root, then the path."""
    return jnp.concatenate([jnp.zeros((path_BD.shape[0], 1), path_BD.dtype), path_BD], axis=1)


def commit(state: DecodeState, proposal: Proposal, verdict: Verdict) -> DecodeState:
    """Append the accepted tokens and the target's own, up to a stop id or the limit, and count them if counting.

    Finished rows emit nothing. The cache is left as it is: `settle` moves its committed length.
    """
    tokens = committed_tokens(proposal, verdict)
    offset = jnp.arange(tokens.shape[1])[None, :]
    accepted = verdict.accepted[:, None]
    room = jnp.where(state.status == RUNNING, state.limit - state.length, 0)
    stop = jnp.any(tokens[:, :, None] == state.stop_ids[None, None, :], axis=2)
    wanted = jnp.minimum(verdict.accepted + 1, room)
    hit = stop & (offset < wanted[:, None])
    emitted = jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1) + 1, wanted).astype(jnp.int32)

    was_running = state.status == RUNNING
    length = state.length + emitted
    status = jnp.where(jnp.any(hit, axis=1), STOPPED, jnp.where(length >= state.limit, FULL, state.status))
    from_draft = Committed((offset < accepted).astype(jnp.int32), emitted)
    drafted = append(state.drafted.astype(jnp.int32), state.length, from_draft).astype(bool)
    if state.logprobs is not None and verdict.logprob is not None:
        state = state.replace(logprobs=append(state.logprobs, state.length, Committed(verdict.logprob, emitted)))
    if state.counters is not None:
        state = state.replace(counters=count(state.counters, was_running, proposal, verdict, emitted))
    return state.replace(
        tokens=append(state.tokens, state.length, Committed(tokens, emitted)),
        drafted=drafted,
        length=length,
        status=jnp.where(was_running, status, state.status),
    )


def settle(
    params: Params,
    state: DecodeState,
    before_B: Array,
    verdict: Verdict,
    features: tuple[Array, ...],
    target: Target,
    drafter: Drafter,
) -> DecodeState:
    """After a commit: the cache keeps what was committed, and the drafter's memory is told of it.

    `before` int32 [B] is each row's length before the commit, `features` what `score` returned beside the logits.
    """
    cache = state.cache
    if drafter.shape != chain(drafter.depth):
        assert target.keep_path is not None, "make_request refuses a tree where the cache can't keep a path"
        cache = target.keep_path(cache, verdict.path)
        at = _from_root(verdict.path)[:, :, None]
        features = tuple(jnp.take_along_axis(f, at, axis=1) for f in features)
    told = Committed(_window(state, before_B, drafter.depth + 1), state.length - before_B)
    return state.replace(
        cache=target.set_length(cache, state.length - 1),
        memory=drafter.memory.update(params, state.memory, told, features),
    )
