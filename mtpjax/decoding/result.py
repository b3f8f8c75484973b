"""What comes back from `generate`: text, ids and every figure, and how they look in a notebook."""

import html
from dataclasses import dataclass, field

import numpy as np

from mtpjax.decoding.loop import STOPPED, DecodeState
from mtpjax.decoding.request import Request


@dataclass(frozen=True)
class Stats:
    """Figures of one `generate` call, summed over its rows; names as in vLLM. Times leave compilation out.

    Attributes:
        batch: rows.
        depth: drafted tokens per step; 0 is plain decoding.
        prompt_tokens: prompt tokens of all rows.
        new_tokens: emitted tokens of all rows.
        target_passes: decoding passes, summed over the rows that were still running.
        compile_s: seconds spent tracing and compiling.
        prefill_s: seconds to the first token.
        decode_s: seconds from the first token to the last.
        num_drafts: passes in which something was proposed.
        num_draft_tokens: proposed tokens.
        num_accepted_tokens: proposed tokens that were emitted.
        proposed_per_pos: proposals at each depth.
        accepted_per_pos: acceptances at each depth.
        lossless: whether the acceptance rule keeps the target's law.
        tv_per_pos: of a lossy rule, the sum, over the passes that committed a token at each depth, of the exact total
            variation between that token's law under the rule, given the text before it, and the target's; None for a
            lossless rule.
        weight_bytes: bytes of the parameters in memory.
        cache_bytes: bytes of the KV cache in memory.
    """

    batch: int
    depth: int
    prompt_tokens: int
    new_tokens: int
    target_passes: int
    compile_s: float
    prefill_s: float
    decode_s: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    proposed_per_pos: tuple[int, ...]
    accepted_per_pos: tuple[int, ...]
    lossless: bool
    tv_per_pos: tuple[float, ...] | None
    weight_bytes: int
    cache_bytes: int

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after each row's first, all rows together; 0 where nothing was decoded."""
        return max(self.new_tokens - self.batch, 0) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target pass, the target's own included: from 1 to depth + 1."""
        return max(self.new_tokens - self.batch, 0) / self.target_passes if self.target_passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rates_unconditional(self) -> tuple[float, ...]:
        """At each depth, accepted over proposed."""
        pairs = zip(self.accepted_per_pos, self.proposed_per_pos, strict=True)
        return tuple(a / n if n else 0.0 for a, n in pairs)

    @property
    def rates_conditional(self) -> tuple[float, ...]:
        """At each depth, accepted over those whose every earlier token was accepted."""
        before = (self.num_drafts, *self.accepted_per_pos[:-1])
        return tuple(a / n if n else 0.0 for a, n in zip(self.accepted_per_pos, before, strict=False))

    @property
    def accept_histogram(self) -> tuple[int, ...]:
        """How many drafts had 0, 1, ... depth of their tokens accepted."""
        reached = (self.num_drafts, *self.accepted_per_pos, 0)
        return tuple(reached[i] - reached[i + 1] for i in range(len(reached) - 1))

    @property
    def tv_per_token(self) -> float | None:
        """Mean total variation from the target's law of the tokens that target passes committed; None if lossless.

        A token behind the last draft has the target's law and counts 0. The expected sum over a text's tokens bounds
        the total variation of the law of the whole text.
        """
        if self.tv_per_pos is None:
            return None
        return sum(self.tv_per_pos) / max(self.new_tokens - self.batch, 1)

    @property
    def tv_per_step(self) -> float | None:
        """Mean total variation, from the target's law, of the first token that a target pass commits; None if lossless.

        Passes in which nothing was proposed count 0.
        """
        if self.tv_per_pos is None:
            return None
        return (self.tv_per_pos[0] if self.tv_per_pos else 0.0) / max(self.target_passes, 1)

    def __str__(self) -> str:
        text = f"{self.new_tokens} tokens, {self.decode_tok_s:.1f} tok/s, first token {self.prefill_s * 1e3:.0f} ms"
        if self.depth:
            text += f", acceptance length {self.acceptance_length:.2f} at depth {self.depth}"
        if self.tv_per_token is not None:
            text += f", lossy: total variation {self.tv_per_token:.3f} per token"
        return text + f" (compiled in {self.compile_s:.1f} s)"


@dataclass(frozen=True)
class Session:
    """What `resume` needs of a generation: what was asked, the loop's last state, and the stop texts."""

    request: Request
    state: DecodeState
    stop: tuple[str, ...]


@dataclass(frozen=True)
class Generation:
    """Output of `generate`, one entry a row.

    Attributes:
        text: decoded output, without special tokens.
        ids: emitted ids, the stop id included.
        drafted: for each emitted id whether it was an accepted draft (False: the target's own).
        pieces: the text that each emitted id completed; they join to `text`.
        finish_reason: "stop" (a stop id or a stop text) or "length" (the token limit or the context).
        stats: figures of the call.
        logprobs: log-probability of each emitted id in nats, under the model's law before temperature and cuts; None
            unless asked for.
        session: what `resume` takes; None unless kept.
    """

    text: list[str]
    ids: list[list[int]]
    drafted: list[list[bool]] = field(repr=False)
    pieces: list[list[str]] = field(repr=False)
    finish_reason: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = field(default=None, repr=False)
    session: Session | None = field(default=None, repr=False)

    @property
    def lossless(self) -> bool:
        """Whether the acceptance rule kept the target's law; if not, `stats.tv_per_token` says what it cost."""
        return self.stats.lossless

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<div style='margin:.5em 0;white-space:pre-wrap'>{colour(*row)}</div>"
            for row in zip(self.pieces, self.drafted, strict=True)
        )
        return f"{rows}<div style='color:#666'>{html.escape(str(self.stats))}; accepted drafts are marked</div>"


def colour(pieces: list[str], drafted: list[bool]) -> str:
    """HTML of a row's text in which accepted drafts are marked; everything is escaped."""
    style = "background:#cfe8d5;color:#111;border-radius:3px"
    spans = []
    for piece, accepted in zip(pieces, drafted, strict=True):
        text = html.escape(piece)
        spans.append(f"<span style='{style}'>{text}</span>" if accepted and text else text)
    return "".join(spans)


def emitted_ids(state: DecodeState) -> list[list[int]]:
    """The ids each row has emitted so far."""
    tokens, start, end = (np.asarray(x) for x in (state.tokens, state.prompt_length, state.length))
    return [tokens[row, start[row] : end[row]].tolist() for row in range(len(start))]


def emitted_drafted(state: DecodeState) -> list[list[bool]]:
    """For each emitted id whether it was an accepted draft."""
    drafted, start, end = (np.asarray(x) for x in (state.drafted, state.prompt_length, state.length))
    return [drafted[row, start[row] : end[row]].tolist() for row in range(len(start))]


def emitted_logprobs(state: DecodeState) -> list[list[float]] | None:
    """The log-probability of each emitted id, nats; None where they were not kept."""
    if state.logprobs is None:
        return None
    logprobs, start, end = (np.asarray(x) for x in (state.logprobs, state.prompt_length, state.length))
    return [logprobs[row, start[row] : end[row]].tolist() for row in range(len(start))]


def finish_reasons(state: DecodeState) -> list[str]:
    """Why each row ended."""
    return ["stop" if status == STOPPED else "length" for status in np.asarray(state.status)]
