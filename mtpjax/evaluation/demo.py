"""The demo: one real model, plain and speculative, in each precision, every figure measured.

Rows are {precision} x {depth}. Each prompt is generated alone (batch 1), greedily, up to `max_new_tokens` or the end of
the text. The first row, plain decoding in the first precision, is what the others are compared with. The
reference model is let go as soon as the last comparison of laws is done, so two models are held no longer than needed.
"""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import jax
from pydantic import Field, field_validator

from mtpjax.config import Config, to_yaml
from mtpjax.config.dialect import parse_yaml
from mtpjax.decoding.request import bucket, find_drafter
from mtpjax.decoding.result import Generation
from mtpjax.evaluation import quality
from mtpjax.evaluation.manifest import manifest
from mtpjax.evaluation.memory import memory_report
from mtpjax.evaluation.records import DemoResults, PrecisionFigures, PromptText, Row, Sample, to_json
from mtpjax.evaluation.repetition import agreement
from mtpjax.evaluation.report import render
from mtpjax.evaluation.run_folder import run_folder
from mtpjax.evaluation.throughput import generate_warm
from mtpjax.io.lm import LM, default_model, load, open_model
from mtpjax.progress import progress, track
from mtpjax.quant.policy import find_precision

DATA = resources.files("mtpjax.evaluation") / "data"


class Prompt(Config):
    """One chat prompt of the demo."""

    name: Annotated[str, Field(min_length=1)]
    """What it is called in tables."""
    prompt: Annotated[str, Field(min_length=1)]
    """The user's message; the model's chat template is put around it."""
    why: str = ""
    """What speculation can hope for here."""


class Budget(Config):
    """How much a slow row does."""

    prompts: Annotated[int, Field(ge=1)] = 3
    """The first so many prompts."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 32
    """The most tokens for each."""


def default_prompts() -> tuple[Prompt, ...]:
    """The six prompts that come with the package."""
    source = DATA / "prompts.yaml"
    return tuple(Prompt(**values) for values in parse_yaml(source.read_text("utf-8"), source.name))


def default_passage() -> str:
    """The text whose loss is measured, written for this purpose."""
    return (DATA / "passage.txt").read_text("utf-8").strip()


class DemoConfig(Config):
    """What the demo runs."""

    precisions: Annotated[tuple[str, ...], Field(min_length=1)] = ("bf16", "fp8")
    """Precisions in order; the first is the reference."""
    depths: Annotated[tuple[Annotated[int, Field(ge=0, le=8)], ...], Field(min_length=1)] = (0, 3)
    """Drafted tokens per step in order; 0, plain decoding, comes first."""
    drafter: str = "ngram"
    """Who drafts."""
    max_new_tokens: Annotated[int, Field(ge=2)] = 128
    """The most tokens for each prompt."""
    fp8: Budget = Budget()
    """A smaller budget for FP8, which XLA runs slowly on a CPU: it converts each weight again for every pass."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the sampler; greedy decoding draws nothing from it."""
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1)] = Field(default_factory=default_prompts)
    """The prompts."""
    passage: Annotated[str, Field(min_length=20)] = Field(default_factory=default_passage)
    """The text whose negative log-likelihood is measured."""

    @field_validator("precisions")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            find_precision(name)
        return _unique(names)

    @field_validator("depths")
    @classmethod
    def _plain_first(cls, depths: tuple[int, ...]) -> tuple[int, ...]:
        if depths[0] != 0:
            raise ValueError("expected 0 first: plain decoding is what the other depths are compared with")
        return _unique(depths)

    @field_validator("drafter")
    @classmethod
    def _drafter(cls, name: str) -> str:
        find_drafter(name, 1)
        return name

    @field_validator("prompts")
    @classmethod
    def _names(cls, prompts: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
        _unique(tuple(prompt.name for prompt in prompts))
        return prompts

    def budget(self, precision: str) -> tuple[int, int]:
        """(prompts, max_new_tokens) of a precision's rows."""
        if precision != "fp8":
            return len(self.prompts), self.max_new_tokens
        return min(self.fp8.prompts, len(self.prompts)), min(self.fp8.max_new_tokens, self.max_new_tokens)


def _unique(values: tuple[Any, ...]) -> tuple[Any, ...]:
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} stands twice")
    return values


type Say = Callable[[str], None]
type Margins = dict[str, list[float]]


def run(config: DemoConfig, model: Path | None, say: Say = lambda _: None) -> DemoResults:
    """Measure everything; `say` is told each result in a line as it comes. UserError for bad input."""
    rows: list[Row] = []
    precisions: list[PrecisionFigures] = []
    margins: Margins = {}
    lm, load_s = _load(model, config.precisions[0], say)
    prompts = tuple(_prompt_text(lm, prompt) for prompt in config.prompts)
    capacity = _capacity(config, prompts)
    reference: LM | None = None
    for name in config.precisions:
        if name != lm.precision:
            lm, load_s = _load(model, name, say)
        precisions.append(_precision(config, lm, reference, load_s, capacity))
        say(f"  loss of the passage {precisions[-1].nll:.4f} nats/token")
        reference = None if name == config.precisions[-1] else reference or lm
        outputs = _generate(config, lm)
        margins = margins or _margins(config, lm, outputs[0])
        for depth in config.depths:
            rows.append(_row(config, lm.precision, depth, outputs, rows[0] if rows else None, margins))
            say(f"  depth {depth}: {rows[-1].tok_s.median:.1f} tok/s over {len(rows[-1].samples)} prompts")
    return DemoResults(
        model=lm.name,
        n_params=lm.n_params,
        drafter=config.drafter,
        platform=jax.devices()[0].platform,
        prompts=prompts,
        passage_tokens=len(quality.encode(lm, config.passage)),
        capacity=capacity,
        precisions=tuple(precisions),
        rows=tuple(rows),
    )


def _load(model: Path | None, precision: str, say: Say) -> tuple[LM, float]:
    start = perf_counter()
    lm = load(model, precision=precision)
    load_s = perf_counter() - start
    say(f"{lm.name} in {precision}: {lm.n_bytes / 1e6:,.0f} MB of weights, loaded in {load_s:.1f} s")
    return lm, load_s


def _precision(config: DemoConfig, lm: LM, reference: LM | None, load_s: float, capacity: int) -> PrecisionFigures:
    ids = quality.encode(lm, config.passage)
    with progress(f"{lm.precision}: loss of the passage"):
        nll = float(quality.score(lm, ids).nll.mean())
        distance = quality.compare(lm, reference, ids) if reference else None
    return PrecisionFigures(
        name=lm.precision,
        load_s=load_s,
        memory=memory_report(lm, 1, capacity),
        nll=nll,
        kl=distance.kl if distance else None,
        top1_agreement=distance.top1_agreement if distance else None,
    )


def run_to_folder(
    config: DemoConfig, model: Path | None, parent: Path, *, command: Sequence[str], xla_flags: str, say: Say
) -> tuple[DemoResults, Path]:
    """`run`, its results in a new folder under `parent`: config.yaml, manifest.json, results.json, report.html.

    Returns the results and the folder. UserError for bad input and for a folder that can't be written, before any work.
    """
    file = open_model(model or default_model()).path
    with run_folder(parent) as folder:
        facts = manifest(file, command=command, xla_flags=xla_flags, seeds=[config.seed])
        results = run(config, file, say)
        (folder.work / "config.yaml").write_text(to_yaml(config), "utf-8")
        (folder.work / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
        (folder.work / "results.json").write_text(json.dumps(to_json(results), indent=1) + "\n", "utf-8")
        (folder.work / "report.html").write_text(render(results, facts), "utf-8")
    return results, folder.path


type Outputs = dict[int, dict[str, tuple[Generation, float]]]
"""By depth and prompt: the output and the seconds spent compiling for it."""


def _generate(config: DemoConfig, lm: LM) -> Outputs:
    """All rows of one precision. The depths take turns, so that a machine that slows down slows them alike."""
    count, max_new_tokens = config.budget(lm.precision)
    outputs: Outputs = {depth: {} for depth in config.depths}
    tasks = [(prompt, depth) for prompt in config.prompts[:count] for depth in config.depths]
    for prompt, depth in track(tasks, f"{lm.precision}: texts"):
        outputs[depth][prompt.name] = generate_warm(
            lm,
            prompt.prompt,
            chat=True,
            max_new_tokens=max_new_tokens,
            drafter=config.drafter if depth else None,
            depth=depth,
            seed=config.seed,
        )
    return outputs


def _row(
    config: DemoConfig, precision: str, depth: int, outputs: Outputs, reference: Row | None, margins: Margins
) -> Row:
    expected = {sample.prompt: sample.ids for sample in reference.samples} if reference else {}
    samples = []
    for name, (out, _) in outputs[depth].items():
        ids = out.ids[0]
        same = agreement(ids, expected.get(name, ids), margins.get(name, ()))
        samples.append(Sample(name, ids, out.pieces[0], out.drafted[0], out.finish_reason[0], out.stats, same))
    compile_s = sum(seconds for _, seconds in outputs[depth].values())
    return Row(precision, depth, config.budget(precision)[1], compile_s, tuple(samples))


def _margins(config: DemoConfig, lm: LM, outputs: dict[str, tuple[Generation, float]]) -> Margins:
    """For each token of the reference's outputs, the logits between its law's two best tokens."""
    margins = {}
    for prompt in config.prompts[: len(outputs)]:
        before, ids = _prompt_ids(lm, prompt), outputs[prompt.name][0].ids[0]
        margins[prompt.name] = quality.score(lm, before + ids).margin[len(before) - 1 :].tolist()
    return margins


def _prompt_ids(lm: LM, prompt: Prompt) -> list[int]:
    return lm.tokenizer.encode(lm.tokenizer.chat(prompt.prompt))


def _prompt_text(lm: LM, prompt: Prompt) -> PromptText:
    return PromptText(prompt.name, prompt.prompt, prompt.why, len(_prompt_ids(lm, prompt)))


def _capacity(config: DemoConfig, prompts: tuple[PromptText, ...]) -> int:
    """Tokens that the cache of the longest prompt has room for."""
    return bucket(max(prompt.tokens for prompt in prompts) + config.max_new_tokens + max(config.depths) + 1)
