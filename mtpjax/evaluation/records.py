"""The demo's results as records: one a generated text, one a row, one a precision; and all of it as JSON."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from mtpjax.decoding.result import Stats
from mtpjax.evaluation.memory import bytes_by_kind
from mtpjax.evaluation.repetition import Agreement, repetition
from mtpjax.evaluation.throughput import Spread, figures, pass_ms, pool, spread
from mtpjax.quant.policy import ReportRow


@dataclass(frozen=True)
class Sample:
    """One prompt's output in one row. `agreement` is with the reference row's output for the same prompt."""

    prompt: str
    ids: list[int]
    pieces: list[str]
    drafted: list[bool]
    finish_reason: str
    stats: Stats
    agreement: Agreement

    @property
    def text(self) -> str:
        """The output, without special tokens."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Row:
    """One precision at one depth. `compile_s` is the time spent compiling for it, in no other figure.

    `max_new_tokens` and the number of samples may be less than the demo's (see `DemoConfig.fp8`).
    """

    precision: str
    depth: int
    max_new_tokens: int
    compile_s: float
    samples: tuple[Sample, ...]

    @property
    def key(self) -> tuple[str, int]:
        """What tells rows apart."""
        return self.precision, self.depth

    @property
    def total(self) -> Stats:
        """Counts and times of all samples together."""
        return pool([sample.stats for sample in self.samples])

    @property
    def tok_s(self) -> Spread:
        """Decoding speed over the prompts."""
        return spread([sample.stats.decode_tok_s for sample in self.samples])

    @property
    def first_token_ms(self) -> Spread:
        """Time to first token over the prompts."""
        return spread([1e3 * sample.stats.prefill_s for sample in self.samples])

    @property
    def pass_ms(self) -> float:
        """Milliseconds of one decoding pass, over all samples."""
        return pass_ms(self.total)

    @property
    def identical(self) -> int:
        """How many samples agree with the reference as far as they can be compared."""
        return sum(sample.agreement.first_difference is None for sample in self.samples)


@dataclass(frozen=True)
class PrecisionFigures:
    """What a precision costs and what it does to the law, whatever the depth.

    nll: nats a token of the passage. kl (nats a token) and top1_agreement: against the reference precision on the
    passage, None for the reference itself. memory: rows of `precision_report`, with the cache of one prompt.
    """

    name: str
    load_s: float
    memory: list[ReportRow]
    nll: float
    kl: float | None
    top1_agreement: float | None

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of weights, scales and cache."""
        return bytes_by_kind(self.memory)


@dataclass(frozen=True)
class PromptText:
    """A prompt, as written in the config, and its length in tokens with the chat template around it."""

    name: str
    prompt: str
    why: str
    tokens: int


@dataclass(frozen=True)
class DemoResults:
    """Everything that the demo found. The first row is the reference of every comparison."""

    model: str
    n_params: int
    drafter: str
    platform: str
    prompts: tuple[PromptText, ...]
    passage_tokens: int
    capacity: int
    precisions: tuple[PrecisionFigures, ...]
    rows: tuple[Row, ...]

    @property
    def reference(self) -> Row:
        """The row that the others are compared with: plain decoding in the first precision."""
        return self.rows[0]

    def row(self, precision: str, depth: int) -> Row | None:
        """A row by its key, None where there is none."""
        return next((row for row in self.rows if row.key == (precision, depth)), None)

    def plain(self, row: Row) -> Row | None:
        """The row of plain decoding in the same precision, None for that row itself or where there is none."""
        return self.row(row.precision, 0) if row.depth else None

    def precision(self, name: str) -> PrecisionFigures:
        """A precision's figures by its name."""
        return next(figures for figures in self.precisions if figures.name == name)


@dataclass(frozen=True)
class Gain:
    """Where a speed-up comes from: a pass commits more tokens (`tokens`) and costs more (`cost`).

    expected: tokens / cost, over all tokens. measured: median over the prompts of their own speed ratio.
    """

    tokens: float
    cost: float
    expected: float
    measured: float


def gain(row: Row, plain: Row) -> Gain:
    """The speed-up of a speculative row over plain decoding of the same prompts."""
    tokens = row.total.acceptance_length
    cost = row.pass_ms / plain.pass_ms if plain.pass_ms else 0.0
    speed = {sample.prompt: sample.stats.decode_tok_s for sample in plain.samples}
    ratios = [s.stats.decode_tok_s / speed[s.prompt] for s in row.samples if speed.get(s.prompt)]
    return Gain(tokens, cost, tokens / cost if cost else 0.0, spread(ratios).median if ratios else 0.0)


def to_json(results: DemoResults) -> dict[str, Any]:
    """The results with every derived figure, as plain JSON values."""
    return {
        "model": {"name": results.model, "parameters": results.n_params},
        "drafter": results.drafter,
        "reference": {"precision": results.reference.precision, "depth": results.reference.depth},
        "prompts": [dataclasses.asdict(prompt) for prompt in results.prompts],
        "passage_tokens": results.passage_tokens,
        "cache_capacity_tokens": results.capacity,
        "precisions": [
            dataclasses.asdict(figures) | {"bytes": figures.bytes} | {"nll_unit": "nats/token"}
            for figures in results.precisions
        ],
        "rows": [_row_json(row, results) for row in results.rows],
    }


def _row_json(row: Row, results: DemoResults) -> dict[str, Any]:
    plain = results.plain(row)
    return {
        "precision": row.precision,
        "depth": row.depth,
        "prompts": len(row.samples),
        "max_new_tokens": row.max_new_tokens,
        "compile_s": row.compile_s,
        "decode_tok_s": dataclasses.asdict(row.tok_s),
        "first_token_ms": dataclasses.asdict(row.first_token_ms),
        "pass_ms": row.pass_ms,
        "gain": dataclasses.asdict(gain(row, plain)) if plain else None,
        "identical_to_reference": row.identical,
        "repetition": repetition([sample.ids for sample in row.samples]),
        "total": figures(row.total),
        "samples": [_sample_json(sample) for sample in row.samples],
    }


def _sample_json(sample: Sample) -> dict[str, Any]:
    same = sample.agreement
    return {
        "prompt": sample.prompt,
        "text": sample.text,
        "ids": sample.ids,
        "drafted": sample.drafted,
        "finish_reason": sample.finish_reason,
        "agreement": dataclasses.asdict(same) | {"share": same.share, "first_difference": same.first_difference},
        "repetition": repetition([sample.ids]),
        "stats": figures(sample.stats),
    }
