"""`generate` and `stream`: text to ids, prefill, the compiled loop, ids to text.

The first call with a new shape compiles; numbers (temperature, seeds, limits, prompt lengths inside a bucket) do not.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decoding import loop
from mtpjax.decoding.compile_clock import CompileClock
from mtpjax.decoding.drafters import Drafter, Params
from mtpjax.decoding.loop import DecodeState
from mtpjax.decoding.request import Request, make_request
from mtpjax.decoding.result import Generation, Stats, emitted_drafted, emitted_ids, finish_reasons
from mtpjax.decoding.target import Target, target_from_model
from mtpjax.decoding.verify import Rule
from mtpjax.errors import UserError
from mtpjax.io.lm import LM
from mtpjax.progress import progress
from mtpjax.quant.policy import find_precision

Prompts = str | Sequence[str] | Sequence[Sequence[int]]
STEPS_PER_CALL = 64


def generate(
    lm: LM,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: str | Drafter | None = None,
    depth: int | None = None,
    rule: str | Rule = "rejection",
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
    chat: bool = False,
) -> Generation:
    """Continue each prompt.

    Args:
        lm: a loaded model.
        prompts: a text, several texts, or several lists of ids. Rows may differ in length.
        max_new_tokens: the most tokens to emit, per call or per row; the context may end a row sooner.
        drafter: None for plain decoding, a name in `DRAFTERS` ("ngram"), or a `Drafter`.
        depth: drafted tokens per step; 3 with a drafter unless given; 0 is plain decoding.
        rule: acceptance rule, a name in `RULES` or a `Rule`; "rejection" and "block" are lossless at every
            temperature. `stats.lossless` says which the rule is, `stats.tv_per_token` what a lossy one costs.
        temperature: 0 is greedy; per call or per row, as are top_k, top_p and min_p.
        top_k: sample among the k largest; 0 is off.
        top_p: smallest set of tokens with at least this probability; 1 is off.
        min_p: tokens with at least this share of the largest probability; 0 is off.
        seed: row b uses seed + b; or one seed per row. A row's output depends on its own seed and prompt only.
        stop_ids: ids that end a row, emitted as its last; default the model's end-of-text ids; () for none.
        chat: wrap each text in the model's chat template as a user's message.

    Returns:
        A `Generation`: text, ids, which tokens were accepted drafts, and `stats`.

    Raises:
        UserError: for any bad input, in one line, before any work.
    """
    request = _request(
        lm,
        prompts,
        chat=chat,
        stop_ids=stop_ids,
        max_new_tokens=max_new_tokens,
        drafter=drafter,
        depth=depth,
        rule=rule,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    state, stats = run(target_of(lm), lm.params, request)
    return _generation(lm, state, stats)


def stream(lm: LM, prompt: str | Sequence[int], *, steps_per_chunk: int = 2, **settings: Any) -> "Stream":
    """Continue one prompt and hand out its text as it is made: iterate over the result.

    Takes the settings of `generate`. The chunks join to the text that `generate` returns; none splits a character.
    """
    prompts = [prompt] if isinstance(prompt, str) else [list(prompt)]
    return Stream(lm, _request(lm, prompts, **settings), steps_per_chunk)


class Stream:
    """Iterator over the chunks of one row's text.

    Attributes:
        ids: the ids emitted so far.
        drafted: for each of them whether it was an accepted draft.
        result: the whole `Generation`, once the iterator has ended; None before.
    """

    def __init__(self, lm: LM, request: Request, steps_per_chunk: int) -> None:
        self.ids: list[int] = []
        self.drafted: list[bool] = []
        self.result: Generation | None = None
        self._chunks = self._run(lm, request, steps_per_chunk)

    def __iter__(self) -> Iterator[str]:
        return self._chunks

    def _run(self, lm: LM, request: Request, steps: int) -> Iterator[str]:
        decoder = lm.tokenizer.stream(continuation=True)
        for done in rounds(target_of(lm), lm.params, request, steps):
            state, _ = done
            sent = len(self.ids)
            self.ids, self.drafted = emitted_ids(state)[0], emitted_drafted(state)[0]
            chunk = decoder.push(self.ids[sent:])
            if chunk:
                yield chunk
        self.result = _generation(lm, *done)
        rest = decoder.flush()
        if rest:
            yield rest


def rounds(
    target: Target, target_params: Any, request: Request, steps: int = STEPS_PER_CALL
) -> Iterator[tuple[DecodeState, Stats]]:
    """Prefill, then decode `steps` steps at a time: yields the state after each, with the figures so far.

    The loops overwrite the state they are given: read what you need of it before asking for the next.
    """
    params = Params(target_params, request.drafter_params)
    with CompileClock() as clock:
        start, compiled = time.perf_counter(), clock.seconds
        state = start_state(target, request)
        state = loop.prefill(
            params,
            state,
            target=target,
            memory=request.drafter.memory,
            rule=request.rule,
            chunk=request.chunk,
        )
        jax.block_until_ready(state.length)
        prefill_s = time.perf_counter() - start - (clock.seconds - compiled)
        state = loop.start_counting(state, request.drafter.depth)
        decode_s = 0.0
        yield state, _stats(request, params, state, clock.seconds, prefill_s, decode_s)
        while np.any(np.asarray(state.status) == loop.RUNNING):
            start, compiled = time.perf_counter(), clock.seconds
            state = loop.decode(
                params, state, jnp.int32(steps), target=target, drafter=request.drafter, rule=request.rule
            )
            jax.block_until_ready(state.length)
            decode_s += time.perf_counter() - start - (clock.seconds - compiled)
            yield state, _stats(request, params, state, clock.seconds, prefill_s, decode_s)


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


def run(target: Target, target_params: Any, request: Request) -> tuple[DecodeState, Stats]:
    """Drive a request to its end: the final state and its figures. For any target, ours or a user's own."""
    wanted = int(np.sum(request.limit - request.prompt_length))
    with progress("generating", total=wanted) as advance:
        done = 0
        for latest in rounds(target, target_params, request):
            advance(latest[1].new_tokens - done)
            done = latest[1].new_tokens
    return latest


def target_of(lm: LM) -> Target:
    """The target seam of a loaded model; ids beyond its tokenizer are never emitted."""
    # pyrefly: ignore [bad-argument-type] -- Linen modules hash by their fields
    return target_from_model(lm.model, lm.tokenizer.vocab_size, find_precision(lm.precision).cache)


def encode_prompts(lm: LM, prompts: Prompts, chat: bool) -> list[list[int]]:
    """Ids of each prompt; texts are wrapped in the chat template if asked."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence):
        raise UserError(f"prompts is {type(prompts).__name__}, expected a text, a list of texts, or lists of ids")
    return [_encode(lm, prompt, chat) for prompt in prompts]


def _encode(lm: LM, prompt: str | Sequence[int], chat: bool) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise UserError("the prompt is empty: expected some text")
        return lm.tokenizer.encode(lm.tokenizer.chat(prompt) if chat else prompt)
    if chat:
        raise UserError("chat=True needs prompts as text, but ids were given: apply the template yourself")
    if not isinstance(prompt, Sequence | np.ndarray) or not all(isinstance(i, int | np.integer) for i in prompt):
        raise UserError(f"a prompt is {type(prompt).__name__}, expected a text or a list of token ids")
    return [int(i) for i in prompt]


def _request(
    lm: LM, prompts: Prompts, *, chat: bool = False, stop_ids: Sequence[int] | None = None, **settings: Any
) -> Request:
    stops = lm.tokenizer.stop_ids if stop_ids is None else stop_ids
    return make_request(target_of(lm), encode_prompts(lm, prompts, chat), stop_ids=stops, **settings)


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


def _generation(lm: LM, state: DecodeState, stats: Stats) -> Generation:
    ids = emitted_ids(state)
    pieces = [_pieces(lm, row) for row in ids]
    return Generation(
        text=["".join(row) for row in pieces],
        ids=ids,
        drafted=emitted_drafted(state),
        pieces=pieces,
        finish_reason=finish_reasons(state),
        stats=stats,
    )


def _pieces(lm: LM, ids: list[int]) -> list[str]:
    decoder = lm.tokenizer.stream(continuation=True)
    pieces = [decoder.push([i]) for i in ids]
    rest = decoder.flush()
    return [*pieces[:-1], pieces[-1] + rest] if pieces else []
