"""How far ahead should prompt lookup look? Acceptance, cost and gain at depth 0, 1, 2, ...

    python experiments/ngram_depth.py configs/ngram_depth.yaml [key=value ...] [--precision bf16] [--out FOLDER]

Every prompt is decoded greedily, alone, at each depth. Greedy ids do not depend on the depth, so all depths emit the
same tokens and their times compare. Four things are measured: the acceptance length tau; the time to decode; the time
of a target pass over a window alone, in a loop of its own and in turn with plain passes; whether the ids equal those of
plain decoding.

Prompt lookup drafts at no cost to speak of, so the gain should be tau / v, with v = window pass / plain pass. Three
predictions of tau stand beside the measured one (2211.17192 has the first):

    i.i.d.        (1 - a^(depth+1)) / (1 - a), a the rate at depth 1 over all prompts
    mixture       the same with each prompt's own a: all tokens over the sum of each prompt's predicted passes
    per position  1 + sum_j prod_{i<=j} b_i, b_i the conditional rates of the deepest run

A rate here is accepted over passes: a pass for which nothing was found to propose counts as a rejection.

A depth that is done is kept in a hidden file beside the results, so an interrupted run goes on where it was.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script: this checkout, installed or not

from experiments.ngram_depth_page import figure, page
from mtpjax.config import Config, load_config
from mtpjax.decoding.drive import rounds
from mtpjax.decoding.generate import encode_prompts, target_of
from mtpjax.decoding.request import MAX_DEPTH, make_request
from mtpjax.decoding.result import Stats, emitted_ids
from mtpjax.decoding.target import Cache, Target
from mtpjax.errors import UserError
from mtpjax.evaluation.manifest import manifest
from mtpjax.evaluation.quality import score
from mtpjax.evaluation.repetition import agreement
from mtpjax.evaluation.throughput import pass_ms, pool
from mtpjax.io.lm import LM, load
from mtpjax.progress import progress

Row = dict[str, Any]
CONTEXT = 128
"""Committed tokens behind which a pass is timed alone."""
TURNS = 3
"""How often the plain pass and the window pass take turns."""


class Prompt(Config):
    """One prompt: a message of the user."""

    kind: str = Field(min_length=1)
    name: str = Field(min_length=1)
    text: str = Field(min_length=1)


class Study(Config):
    """The whole study."""

    prompts: tuple[Prompt, ...] = Field(min_length=1)
    model: str | None = None
    """A .gguf file or a model folder; null is the installed default."""
    precision: str = "f32"
    max_depth: int = Field(8, ge=1, le=MAX_DEPTH)
    max_new_tokens: int = Field(96, ge=2)
    repeats: int = Field(1, ge=1)
    """Timed runs of each prompt at each depth; their median counts."""
    passes: int = Field(10, ge=1)
    """Passes in one timing of the window alone."""
    per_kind: int | None = Field(None, ge=1)
    """Take only so many prompts of each kind."""

    @property
    def chosen(self) -> list[Prompt]:
        """The prompts to run, in order."""
        kinds = dict.fromkeys(prompt.kind for prompt in self.prompts)
        return [p for kind in kinds for p in [p for p in self.prompts if p.kind == kind][: self.per_kind]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="How far ahead should prompt lookup look?")
    parser.add_argument("config", type=Path, help="a YAML file, such as configs/ngram_depth.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the file")
    parser.add_argument("--precision", help="short for precision=...")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
    asked = parser.parse_intermixed_args(arguments)
    precision = [f"precision={asked.precision}"] if asked.precision else []
    try:
        study = load_config(Study, asked.config, [*asked.overrides, *precision])
        lm = load(study.model, precision=study.precision)
        facts = manifest(
            Path(lm.source),
            command=["python", "experiments/ngram_depth.py", *arguments],
            xla_flags=os.environ.get("XLA_FLAGS", ""),
            seeds=[],
        )
        for file in run(lm, study, asked.out, facts):
            print(file)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(lm: LM, study: Study, out: Path, facts: Row) -> list[Path]:
    """Measure every depth that is not done yet and write the results: the paths of .json, .md and .png."""
    name = "ngram_depth" if study.precision == "f32" else f"ngram_depth_{study.precision}"
    kept = out / f".{name}.partial.json"
    key = {"study": study.model_dump(mode="json"), **{k: facts[k] for k in ("source", "versions", "device", "model")}}
    key = json.loads(json.dumps(key))
    done = _resume(kept, key)
    with progress(name, total=(study.max_depth + 1) * len(study.chosen) * study.repeats) as advance:
        for depth in range(study.max_depth + 1):
            if depth < len(done["rows"]):
                advance(len(study.chosen) * study.repeats)
                continue
            done["rows"].append(measure_depth(lm, study, depth, done["rows"][0] if depth else None, advance))
            write_atomically(kept, json.dumps({"key": key, **done}).encode())
    results = {"study": key["study"], "manifest": facts, **done, "analysis": analyse(done["rows"])}
    written = {
        "json": (json.dumps(results, indent=1) + "\n").encode(),
        "png": figure(results),
        "md": page(results, f"{name}.png").encode(),
    }
    for suffix, data in written.items():
        write_atomically(out / f"{name}.{suffix}", data)
    kept.unlink()
    return [out / f"{name}.{suffix}" for suffix in written]


def measure_depth(lm: LM, study: Study, depth: int, plain: Row | None, advance: Callable[[int], None]) -> Row:
    """Everything about one depth; `plain` is the row of depth 0, with which ids are compared."""
    target = target_of(lm)
    settings: Row = {"max_new_tokens": study.max_new_tokens, "stop_ids": lm.tokenizer.stop_ids}
    ids = encode_prompts(lm, [prompt.text for prompt in study.chosen], chat=lm.tokenizer.template is not None)
    requests = [make_request(target, [row], drafter="ngram", depth=depth, **settings) for row in ids]
    _, warm_up = decode(target, lm.params, requests[0])
    samples = []
    for at, (prompt, request) in enumerate(zip(study.chosen, requests, strict=True)):
        runs = []
        for _ in range(study.repeats):
            runs.append(decode(target, lm.params, request))
            advance(1)
        times = [stats.decode_s for _, stats in runs]
        stats = dataclasses.replace(runs[0][1], decode_s=statistics.median(times))
        sample: Row = {"kind": prompt.kind, "name": prompt.name, "ids": runs[0][0], "stats": dataclasses.asdict(stats)}
        sample |= {"decode_s": times, "difference": None}
        if plain is not None:
            sample["difference"] = difference(lm, ids[at], plain["samples"][at]["ids"], sample["ids"])
        samples.append(sample)
    return {
        "depth": depth,
        "compile_s": warm_up.compile_s,
        "samples": samples,
        "pass_ms": time_passes(target, lm.params, depth + 1, study.passes),
    }


def decode(target: Target, params: Any, request: Any) -> tuple[list[int], Stats]:
    """One run to the end: the ids of its only row, and the figures."""
    state, stats = list(rounds(target, params, request))[-1]
    return emitted_ids(state)[0], stats


def difference(lm: LM, prompt: list[int], plain: list[int], ids: list[int]) -> Row | None:
    """Where `ids` leave plain decoding's, and the logits between its two best tokens there; None if nowhere."""
    same = agreement(ids, plain)
    if same.first_difference is None and len(ids) == len(plain):
        return None
    margins = score(lm, prompt + plain).margin[len(prompt) - 1 :]
    return {"at": same.equal, "margin": float(margins[min(same.equal, len(margins) - 1)])}


def time_passes(target: Target, params: Any, width: int, passes: int) -> Row:
    """Milliseconds of a target pass over `width` tokens and over one, in turn: {"window": ..., "plain": ...}."""
    widths = {"plain": 1, "window": width}
    times: dict[int, list[float]] = {w: [] for w in widths.values()}
    cache = target.set_length(target.init_cache(1, 2 * CONTEXT), jnp.full(1, CONTEXT, jnp.int32))
    for turn, w in itertools.product(range(TURNS + 1), times):
        ids, positions = jnp.ones((1, w), jnp.int32), CONTEXT + jnp.arange(w)[None, :]
        start = perf_counter()
        ids, cache = _repeat_pass(params, ids, cache, positions, jnp.int32(passes if turn else 1), target=target)
        jax.block_until_ready(ids)
        if turn:  # the first one compiles
            times[w].append(1e3 * (perf_counter() - start) / passes)
    return {name: statistics.median(times[w]) for name, w in widths.items()}


@partial(jax.jit, static_argnames="target", donate_argnames="cache")
def _repeat_pass(
    params: Any, ids_BW: Array, cache: Cache, positions_BW: Array, count: Array, *, target: Target
) -> tuple[Array, Cache]:
    def one(i: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        ids, cache = carry
        logits, _, written = target.forward(params, ids, cache, positions_BW, None, None, ())
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), written

    return lax.fori_loop(0, count, one, (ids_BW, cache))


def analyse(rows: Sequence[Row]) -> list[Row]:
    """One record for each depth and kind of prompt, "all" among them: what was measured, and what theory says."""
    records = []
    for kind in [*dict.fromkeys(sample["kind"] for sample in rows[0]["samples"]), "all"]:
        stats = [_stats(row, kind) for row in rows]
        pooled = [pool(of_depth) for of_depth in stats]
        for depth, (row, total) in enumerate(zip(rows, pooled, strict=True)):
            v = row["pass_ms"]["window"] / row["pass_ms"]["plain"]
            tau = total.acceptance_length
            records.append({
                "kind": kind,
                "depth": depth,
                "new_tokens": total.new_tokens,
                "acceptance_length": tau,
                "predicted_iid": iid(per_pass(pooled[1])[0], depth),
                "predicted_mixture": mixture(stats[1], depth),
                "predicted_per_position": per_position(per_pass(pooled[-1]), depth),
                "rates_unconditional": total.rates_unconditional,
                "rates_conditional": total.rates_conditional,
                "decode_tok_s": total.decode_tok_s,
                "gain": total.decode_tok_s / pooled[0].decode_tok_s,
                "plain_ms": row["pass_ms"]["plain"],
                "window_ms": row["pass_ms"]["window"],
                "window_cost": v,
                "gain_predicted": tau / v,
                "step_ms": pass_ms(total),
            })  # fmt: skip
    return records


def _stats(row: Row, kind: str) -> list[Stats]:
    chosen = [sample["stats"] for sample in row["samples"] if kind in ("all", sample["kind"])]
    return [_from_json(stats) for stats in chosen]


def _from_json(values: Row) -> Stats:
    fields: Row = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return Stats(**fields)


def per_pass(stats: Stats) -> list[float]:
    """Conditional acceptance at each place; at the first over all passes, those without a proposal included."""
    before = (stats.target_passes, *stats.accepted_per_pos)
    return [a / n if n else 0.0 for a, n in zip(stats.accepted_per_pos, before, strict=False)]


def iid(a: float, depth: int) -> float:
    """Tokens a pass if each place is accepted with probability `a`, whatever happened at the others."""
    return depth + 1.0 if a >= 1.0 else (1.0 - a ** (depth + 1)) / (1.0 - a)


def mixture(stats: Sequence[Stats], depth: int) -> float:
    """Tokens a pass if every prompt is i.i.d. at its own rate; `stats` are the prompts at depth 1."""
    tokens = [s.new_tokens - s.batch for s in stats]
    passes = sum(n / iid(per_pass(s)[0], depth) for n, s in zip(tokens, stats, strict=True))
    return sum(tokens) / passes if passes else 1.0


def per_position(rates: Sequence[float], depth: int) -> float:
    """Tokens a pass from the conditional rate of each place."""
    return 1.0 + float(np.sum(np.cumprod(rates[:depth])))


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all. UserError where that can't be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror or error}); name another folder by --out") from None


def _resume(kept: Path, key: Row) -> Row:
    """What an interrupted run of the same study, code and machine left: its rows, and in how many sittings."""
    try:
        found = json.loads(kept.read_text())
    except (OSError, ValueError):
        found = {}
    if found.get("key") != key:
        return {"sittings": 1, "rows": []}
    return {"sittings": found["sittings"] + 1, "rows": found["rows"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
