"""`generate` and `stream`: text to ids, prefill, the compiled loop, ids to text.

The first call with a new shape compiles; numbers (temperature, seeds, limits, prompt lengths inside a bucket) do not.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtpjax.decoding.adaptive import Adaptive
from mtpjax.decoding.drafters import Drafter
from mtpjax.decoding.drive import extend, rounds, run
from mtpjax.decoding.loop import DecodeState
from mtpjax.decoding.request import Request, make_request
from mtpjax.decoding.result import (
    Generation,
    Session,
    Stats,
    emitted_drafted,
    emitted_ids,
    emitted_logprobs,
    finish_reasons,
)
from mtpjax.decoding.stop_strings import StopStrings
from mtpjax.decoding.target import Target, target_from_model
from mtpjax.decoding.verify import Rule
from mtpjax.errors import UserError
from mtpjax.io.lm import LM
from mtpjax.quant.policy import find_precision

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


def generate(
    lm: LM,
    prompts: Prompts,
    *,
    max_new_tokens: int | Sequence[int] = 128,
    drafter: str | Drafter | Adaptive | None = None,
    depth: int | None = None,
    rule: str | Rule = "rejection",
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    max_depth: int | Sequence[int] | None = None,
    drafter_params: Any = None,
    logprobs: bool = False,
    keep: bool = False,
    chat: bool = False,
) -> Generation:
    """Continue each prompt.

    Args:
        lm: a loaded model.
        prompts: a text, several texts, or several lists of ids. Rows may differ in length.
        max_new_tokens: the most tokens to emit, per call or per row; the context may end a row sooner.
        drafter: None for plain decoding, a name in `DRAFTERS` ("ngram"), a `Drafter`, or `adaptive(...)`.
        depth: drafted tokens per step; 3 with a drafter unless given; 0 is plain decoding.
        rule: acceptance rule, a name in `RULES` or a `Rule`; "rejection" and "block" are lossless at every
            temperature. `stats.lossless` says which the rule is, `stats.tv_per_token` what a lossy one costs.
        temperature: 0 is greedy; per call or per row, as are top_k, top_p and min_p.
        top_k: sample among the k largest; 0 is off.
        top_p: smallest set of tokens with at least this probability; 1 is off.
        min_p: tokens with at least this share of the largest probability; 0 is off.
        seed: row b uses seed + b; or one seed per row. A row's output depends on its own seed and prompt only.
        stop_ids: ids that end a row, emitted as its last; default the model's end-of-text ids; () for none.
        stop: texts that end a row; the row's text ends before, its ids with the token that completed it.
        max_depth: the deepest draft, per call or per row; compiles nothing.
        drafter_params: the drafter's parameters, for one that has any.
        logprobs: give the log-probability of every emitted token, under the model's law before temperature and cuts.
        keep: keep what `resume` needs; it holds the cache in memory.
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
        max_depth=max_depth,
        drafter_params=drafter_params,
        logprobs=logprobs,
    )
    stops = StopStrings(lm.tokenizer, stop, len(request.tokens))
    state, stats = run(target_of(lm), lm.params, request, watch=stops.watch)
    return _generation(lm, request, state, stats, stops, keep)


def resume(lm: LM, generation: Generation, *, max_new_tokens: int = 128) -> Generation:
    """Go on where a generation made with ``keep=True`` ended at its limit: every row gets up to so many more tokens.

    The result is the whole text, with the figures of all calls and the times of the last. Greedy rows emit what one
    long call would have; sampled rows have its law, but the old limit may have cut a block short, and then not its very
    draws. Rows that a stop id or stop text ended stay as they are. The generation given can be resumed again.

    Raises:
        UserError: the generation was not kept, or max_new_tokens is no whole number from 0.
    """
    if generation.session is None:
        raise UserError("this generation cannot be resumed: make it with keep=True")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 0:
        raise UserError(f"max_new_tokens is {max_new_tokens!r}, expected a whole number from 0")
    kept = generation.session
    request, state = extend(target_of(lm), kept.request, kept.state, max_new_tokens)
    stops = StopStrings(lm.tokenizer, kept.stop, len(request.tokens))
    for row, ids in enumerate(generation.ids):
        stops.look(row, ids)
    state, stats = run(target_of(lm), lm.params, request, state=state, watch=stops.watch)
    return _generation(lm, request, state, stats, stops, keep=True)


def stream(lm: LM, prompt: str | Sequence[int], *, steps_per_chunk: int = 2, **settings: Any) -> "Stream":
    """Continue one prompt and hand out its text as it is made: iterate over the result.

    Takes the settings of `generate`. The chunks join to the text that `generate` returns; none splits a character, and
    what may be the beginning of a stop text waits.
    """
    prompts = [prompt] if isinstance(prompt, str) else [list(prompt)]
    stop, keep = settings.pop("stop", ()), settings.pop("keep", False)
    return Stream(lm, _request(lm, prompts, **settings), steps_per_chunk, StopStrings(lm.tokenizer, stop, 1), keep)


class Stream:
    """Iterator over the chunks of one row's text.

    Attributes:
        ids: the ids emitted so far.
        drafted: for each of them whether it was an accepted draft.
        result: the whole `Generation`, once the iterator has ended; None before.
    """

    def __init__(self, lm: LM, request: Request, steps_per_chunk: int, stops: StopStrings, keep: bool) -> None:
        self.ids: list[int] = []
        self.drafted: list[bool] = []
        self.result: Generation | None = None
        self._chunks = self._run(lm, request, steps_per_chunk, stops, keep)

    def __iter__(self) -> Iterator[str]:
        return self._chunks

    def _run(self, lm: LM, request: Request, steps: int, stops: StopStrings, keep: bool) -> Iterator[str]:
        decoder = lm.tokenizer.stream(continuation=True)
        text, shown = "", 0
        for done in rounds(target_of(lm), lm.params, request, steps, watch=stops.watch):
            state, _ = done
            sent = len(self.ids)
            self.ids, self.drafted = emitted_ids(state)[0], emitted_drafted(state)[0]
            text += decoder.push(self.ids[sent:])
            safe = stops.safe(0, text)
            if safe > shown:
                yield text[shown:safe]
                shown = safe
        self.result = _generation(lm, request, *done, stops, keep)
        if len(self.result.text[0]) > shown:
            yield self.result.text[0][shown:]


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


def _generation(
    lm: LM, request: Request, state: DecodeState, stats: Stats, stops: StopStrings, keep: bool
) -> Generation:
    ids = emitted_ids(state)
    pieces = [stops.cut(row, _pieces(lm, of_row)) for row, of_row in enumerate(ids)]
    return Generation(
        text=["".join(row) for row in pieces],
        ids=ids,
        drafted=emitted_drafted(state),
        pieces=pieces,
        finish_reason=finish_reasons(state),
        stats=stats,
        logprobs=emitted_logprobs(state),
        session=Session(request, state, stops.texts) if keep else None,
    )


def _pieces(lm: LM, ids: list[int]) -> list[str]:
    decoder = lm.tokenizer.stream(continuation=True)
    pieces = [decoder.push([i]) for i in ids]
    rest = decoder.flush()
    return [*pieces[:-1], pieces[-1] + rest] if pieces else []
