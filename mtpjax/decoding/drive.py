"""Driving a request through the two compiled loops, for any target: prefill, then decode a few steps at a time.

This is the only host code between calls of the loops: it measures times, stops rows where their text says so, and
takes up again a state that was left.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import loop
from mtpjax.decoding.compile_clock import CompileClock
from mtpjax.decoding.counters import Counters
from mtpjax.decoding.drafters import Params
from mtpjax.decoding.loop import DecodeState
from mtpjax.decoding.request import Request, bucket
from mtpjax.decoding.result import Stats
from mtpjax.decoding.target import Target
from mtpjax.progress import progress

STEPS_PER_CALL = 64

Watch = Callable[[int, list[int]], int | None]
"""``(row, new ids) -> how many of them end the row, or None``: told every emitted id, in order."""


def run(
    target: Target,
    target_params: Any,
    request: Request,
    *,
    state: DecodeState | None = None,
    watch: Watch | None = None,
) -> tuple[DecodeState, Stats]:
    """Drive a request to its end: the final state and its figures. For any target, ours or a user's own."""
    wanted = int(np.sum(request.limit - request.prompt_length))
    with progress("generating", total=wanted) as advance:
        done = 0
        for latest in rounds(target, target_params, request, state=state, watch=watch):
            advance(latest[1].new_tokens - done)
            done = latest[1].new_tokens
    return latest


def rounds(
    target: Target,
    target_params: Any,
    request: Request,
    steps: int = STEPS_PER_CALL,
    *,
    state: DecodeState | None = None,
    watch: Watch | None = None,
) -> Iterator[tuple[DecodeState, Stats]]:
    """Prefill, then decode `steps` steps at a time: yields the state after each, with the figures so far.

    The loops overwrite the state they are given: read what you need of it before asking for the next. With a `state`
    that was left before (see `extend`) there is no prefill. With a `watch` the host looks at every step.
    """
    params = Params(target_params, request.drafter_params)
    static = {"target": target, "rule": request.rule}
    with CompileClock() as clock:
        prefill_s = 0.0
        if state is None:
            start, compiled = time.perf_counter(), clock.seconds
            state = start_state(target, request)
            state = loop.prefill(params, state, memory=request.drafter.memory, chunk=request.chunk, **static)
            jax.block_until_ready(state.length)
            prefill_s = time.perf_counter() - start - (clock.seconds - compiled)
            state = loop.start_decoding(state, request.drafter)
            if watch is not None:
                state = stop_rows(target, state, request.prompt_length, state.counters, watch)
        decode_s = 0.0
        yield state, _stats(request, params, state, clock.seconds, prefill_s, decode_s)
        while np.any(np.asarray(state.status) == loop.RUNNING):
            length, counters = (None, None) if watch is None else jax.tree.map(np.array, (state.length, state.counters))
            start, compiled = time.perf_counter(), clock.seconds
            most = jnp.int32(steps if watch is None else 1)
            state = loop.decode(params, state, most, drafter=request.drafter, **static)
            jax.block_until_ready(state.length)
            decode_s += time.perf_counter() - start - (clock.seconds - compiled)
            if watch is not None and length is not None:
                state = stop_rows(target, state, length, counters, watch)
            yield state, _stats(request, params, state, clock.seconds, prefill_s, decode_s)


def stop_rows(
    target: Target, state: DecodeState, before_B: np.ndarray, counted: Counters | None, watch: Watch
) -> DecodeState:
    """Tell `watch` what one step emitted, and end rows where it says so: what lies behind is taken back.

    `before` is each row's length before the step, `counted` the counters then; those of an ended row count what it
    keeps.
    """
    tokens, length = np.asarray(state.tokens), np.array(state.length)
    ended = np.zeros(len(length), bool)
    for row in np.flatnonzero(length > before_B):
        keep = watch(int(row), tokens[row, before_B[row] : length[row]].tolist())
        if keep is not None:
            ended[row], length[row] = True, before_B[row] + keep
    if not ended.any():
        return state
    assert counted is not None and state.counters is not None
    kept = length - before_B

    def recount(new: Any, old: Any) -> Any:
        new, old = np.array(new), np.asarray(old)
        if new.ndim == 2:
            new[ended] = (old + (new - old) * (np.arange(new.shape[1])[None, :] < kept[:, None]))[ended]
        return jnp.asarray(new)

    now = state.counters
    counters = now.replace(
        emitted=jnp.where(ended, counted.emitted + jnp.minimum(now.emitted - counted.emitted, kept), now.emitted),
        accepted_at=recount(now.accepted_at, counted.accepted_at),
        tv_at=recount(now.tv_at, counted.tv_at),
    )
    length = jnp.asarray(length)
    return state.replace(
        length=length,
        status=jnp.where(ended, loop.STOPPED, state.status),
        cache=target.set_length(state.cache, length - 1),
        counters=counters,
    )


def start_state(target: Target, request: Request) -> DecodeState:
    """The state that `prefill` takes: copies of the request's arrays on the device, an empty cache, an empty memory.

    Copies, since the loops overwrite what they are given, and a request may be run again.
    """
    r = request
    tokens, prompt_length, limit, law, max_depth, stop_ids, seed = jax.tree.map(
        lambda x: jnp.array(x, copy=True),
        (r.tokens, r.prompt_length, r.limit, r.law, r.max_depth, r.stop_ids, r.seed),
    )
    numbers = {name: jnp.float32(value) for name, value in r.rule.settings.items()}
    return loop.init_state(
        target, r.drafter.memory, tokens, prompt_length, limit, law, max_depth, numbers, stop_ids, seed, r.logprobs
    )


def extend(target: Target, request: Request, state: DecodeState, more: int) -> tuple[Request, DecodeState]:
    """Let rows that ended at their limit go on for `more` tokens, or to the context: a copy of the state, to be driven.

    The state grows where its slots do not suffice. Rows ended by a stop stay ended.
    """
    length = np.asarray(state.length)
    limit = np.minimum(length + more, target.max_context).astype(np.int32)
    stopped = np.asarray(state.status) == loop.STOPPED
    limit = np.where(stopped, np.asarray(state.limit), limit)
    slots = bucket(int(limit.max()) + len(request.drafter.shape) + 1)
    request = dataclasses.replace(request, limit=limit)
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
    if slots > state.tokens.shape[1]:
        B = len(length)
        wide = {name: _widened(getattr(state, name), slots) for name in ("tokens", "drafted", "logprobs")}
        cache = jax.tree.map(_corner, state.cache, target.init_cache(B, slots))
        memory = jax.tree.map(_corner, state.memory, request.drafter.memory.init(B, slots))
        state = state.replace(cache=cache, memory=memory, **wide)
    state = state.replace(cache=target.set_length(state.cache, state.length - 1))
    running = jnp.asarray((limit > length) & ~stopped)
    return request, state.replace(limit=jnp.asarray(limit), status=jnp.where(running, loop.RUNNING, state.status))


def _widened(x: Any, slots: int) -> Any:
    return None if x is None else jnp.pad(x, ((0, 0), (0, slots - x.shape[1])))


def _corner(old: Any, empty: Any) -> Any:
    """A larger array that begins with the old one: what is kept by slot grows at its end."""
    return empty.at[tuple(slice(n) for n in old.shape)].set(old)


def _stats(
    request: Request, params: Params, state: DecodeState, compile_s: float, prefill_s: float, decode_s: float
) -> Stats:
    total = {name: np.asarray(rows).sum(axis=0) for name, rows in vars(state.counters).items()}
    emitted = int(np.sum(np.asarray(state.length) - request.prompt_length))
    return Stats(
        batch=len(request.prompt_length),
        depth=request.drafter.depth,
        prompt_tokens=int(request.prompt_length.sum()),
        new_tokens=emitted,
        target_passes=int(total["passes"]),
        compile_s=compile_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        num_drafts=int(total["drafts"]),
        num_draft_tokens=int(total["drafted"]),
        num_accepted_tokens=int(total["accepted_at"].sum()),
        proposed_per_pos=tuple(total["proposed_at"].tolist()),
        accepted_per_pos=tuple(total["accepted_at"].tolist()),
        lossless=request.rule.lossless,
        tv_per_pos=None if request.rule.lossless else tuple(total["tv_at"].tolist()),
        weight_bytes=sum(x.nbytes for x in jax.tree.leaves(params)),
        cache_bytes=sum(x.nbytes for x in jax.tree.leaves(state.cache)),
    )
