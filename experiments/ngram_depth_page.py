"""The page and the figure of `ngram_depth`, made from its results alone."""

import io
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]
QUESTION = """\
Prompt lookup drafts by copying what followed the last time the same words were said. The deeper it drafts, the more a
target pass can commit and the more that pass costs. Which depth pays, for which kind of text, on this machine?"""
UNITS = """\
Units: τ in tokens a target pass; window and step in ms; v and gain are ratios to plain decoding. *Window* is a target
pass with its arg-max in a loop of its own, *step* the whole step of the decoding loop."""
COLOURS = ("#1b7f5c", "#c2571a", "#5b5ea6", "#8a6d3b", "#a23b72")


def figure(results: Row) -> bytes:
    """PNG of three panels: acceptance length, cost of a pass, gain."""
    kinds = _by_kind(results)
    colours = {kind: "black" if kind == "all" else COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    fig = Figure(figsize=(12.5, 3.9), layout="constrained")
    left, middle, right = fig.subplots(1, 3)
    for kind, records in kinds.items():
        depth = [r["depth"] for r in records]
        style: Row = {"color": colours[kind], "marker": "o", "markersize": 4, "linewidth": 2 if kind == "all" else 1.3}
        left.plot(depth, [r["acceptance_length"] for r in records], label=kind, **style)
        right.plot(depth, [r["gain"] for r in records], label=kind, **style)
        right.plot(depth, [r["gain_predicted"] for r in records], color=colours[kind], linestyle="--", linewidth=1)
    depth = [r["depth"] for r in kinds["all"]]
    for name, dashes in (("iid", ":"), ("mixture", "--")):
        left.plot(
            depth, [r[f"predicted_{name}"] for r in kinds["all"]], color="black", linestyle=dashes, linewidth=1,
            label=f"all, predicted: {name.replace('iid', 'i.i.d.')}",
        )  # fmt: skip
    plain_ms = results["rows"][0]["pass_ms"]["plain"]
    cost = [r["window_cost"] for r in kinds["all"]]
    middle.plot(depth, cost, "o-", color="black", markersize=4, label="pass alone, v")
    step = [r["step_ms"] / plain_ms for r in kinds["all"]]
    middle.plot(depth, step, "s--", color="grey", markersize=4, label="whole step of the loop")
    middle.axhline(1, color="lightgrey", linewidth=1, zorder=0)
    right.axhline(1, color="lightgrey", linewidth=1, zorder=0)
    left.set(title="Tokens a target pass (τ)", ylim=(0.9, None))
    middle.set(title="Cost, in plain passes", ylim=(0, None))
    right.set(title="Speed against plain (dashed: predicted, τ / v)", ylim=(0, None))
    for axes in (left, middle, right):
        axes.set_xlabel("depth (tokens drafted a step)")
        axes.set_xticks(depth)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def page(results: Row, image: str) -> str:
    """The Markdown page."""
    study, rows, facts = results["study"], results["rows"], results["manifest"]
    kinds = _by_kind(results)
    prompts = len(rows[0]["samples"])
    everything = kinds["all"]
    parts = [
        "# How far ahead should prompt lookup look?",
        QUESTION,
        f"Model {facts['model']['file']}, {study['precision']}, {prompts} prompts, greedy.",
        f"![Acceptance length, cost of a pass, and gain against depth]({image})",
        "## Answer",
        *_bullets([*_answers(kinds), *_equality(rows)]),
        "## All prompts together",
        _main_table(everything),
        UNITS,
        "## Tokens a pass, measured and predicted",
        _prediction_table(everything),
        "## By kind of prompt",
        _kind_table(kinds, "acceptance_length", "τ (tokens a target pass)"),
        _kind_table(kinds, "decode_tok_s", "decoding speed (tok/s)"),
        _kind_table(kinds, "gain", "gain (speed against plain)"),
        "## Rates at each place, at the greatest depth",
        _rate_table(kinds),
        "Conditional: accepted over proposed whose earlier places were all accepted. Unconditional: over all proposed.",
        "## What is unfavourable",
        *_bullets(_unfavourable(results, kinds)),
        "## Method",
        _method(study, prompts, results["sittings"]),
        "## Made with",
        _made_with(facts),
    ]
    return "\n\n".join(parts) + "\n"


def _by_kind(results: Row) -> dict[str, list[Row]]:
    kinds: dict[str, list[Row]] = {}
    for record in results["analysis"]:
        kinds.setdefault(record["kind"], []).append(record)
    return kinds


def _answers(kinds: dict[str, list[Row]]) -> Iterable[str]:
    for kind, records in kinds.items():
        best = max(records, key=lambda r: r["gain"])
        name = "All prompts together" if kind == "all" else f"{kind.capitalize()}"
        plain = records[0]["decode_tok_s"]
        if best["depth"] == 0:
            deepest = records[-1]
            yield (
                f"{name}: plain decoding is fastest ({plain:.1f} tok/s); depth {deepest['depth']} runs at "
                f"{deepest['gain']:.2f}× of it."
            )
        else:
            yield (
                f"{name}: depth {best['depth']} is best, {best['gain']:.2f}× plain ({best['decode_tok_s']:.1f} against "
                f"{plain:.1f} tok/s), τ = {best['acceptance_length']:.2f}."
            )


def _main_table(records: Sequence[Row]) -> str:
    header = ("depth", "τ", "decode tok/s", "gain", "window, ms", "v", "predicted gain τ/v", "step, ms")
    return _table(
        header,
        [
            (
                r["depth"], f"{r['acceptance_length']:.2f}", f"{r['decode_tok_s']:.1f}", f"{r['gain']:.2f}",
                f"{r['window_ms']:.1f}", f"{r['window_cost']:.2f}", f"{r['gain_predicted']:.2f}", f"{r['step_ms']:.1f}",
            )
            for r in records
        ],
    )  # fmt: skip


def _prediction_table(records: Sequence[Row]) -> str:
    names = ("acceptance_length", "predicted_iid", "predicted_mixture", "predicted_per_position")
    header = ("depth", "measured", "i.i.d.", "mixture of prompts", "per position")
    return _table(header, [(r["depth"], *(f"{r[name]:.2f}" for name in names)) for r in records])


def _kind_table(kinds: dict[str, list[Row]], name: str, title: str) -> str:
    depths = [record["depth"] for record in kinds["all"]]
    header = (title, *(f"depth {d}" for d in depths))
    return _table(header, [(kind, *(f"{r[name]:.2f}" for r in records)) for kind, records in kinds.items()])


def _rate_table(kinds: dict[str, list[Row]]) -> str:
    depth = kinds["all"][-1]["depth"]
    rows = [
        (f"{kind}, {name}", *(f"{rate:.2f}" for rate in records[-1][f"rates_{name}"]))
        for kind, records in kinds.items()
        for name in ("conditional", "unconditional")
    ]
    return _table(("acceptance rate", *(f"place {i + 1}" for i in range(depth))), rows)


def _unfavourable(results: Row, kinds: dict[str, list[Row]]) -> Iterable[str]:
    for kind, records in kinds.items():
        slower = [r for r in records[1:] if r["gain"] < 1]
        if slower:
            worst = min(slower, key=lambda r: r["gain"])
            depths = ", ".join(str(r["depth"]) for r in slower)
            yield f"{kind.capitalize()}: slower than plain at depth {depths}; {worst['gain']:.2f}× at {worst['depth']}."
    last = kinds["all"][-1]
    error = last["predicted_iid"] / last["acceptance_length"] - 1
    yield (
        f"The i.i.d. formula is off by {100 * error:+.0f} % at depth {last['depth']}: prompts differ, and a place is "
        f"accepted more often when the one before it was."
    )
    short, depth = max((1 - r["gain"] / r["gain_predicted"], r["depth"]) for r in kinds["all"])
    yield (
        f"The gain falls short of τ/v by up to {100 * short:.0f} % (depth {depth}): what a step does besides the pass, "
        f"and what the machine did meanwhile."
    )
    compile_s = sum(row["compile_s"] for row in results["rows"])
    yield f"Every depth is compiled anew: {compile_s:.0f} s in all, part of no other figure here."
    plain = [row["pass_ms"]["plain"] for row in results["rows"]]
    yield f"The plain pass alone, timed again at every depth, took from {min(plain):.1f} to {max(plain):.1f} ms."


def _equality(rows: Sequence[Row]) -> Iterable[str]:
    found = [(row["depth"], s["name"], s["difference"]) for row in rows for s in row["samples"] if s["difference"]]
    if not found:
        yield "The ids equal those of plain decoding at every depth, for every prompt."
    for depth, name, where in found:
        yield (
            f"Ids differ from plain decoding's: depth {depth}, {name}, from token {where['at']} on, where plain "
            f"decoding's two best logits lie {where['margin']:.2g} apart."
        )


def _method(study: Row, prompts: int, sittings: int) -> str:
    return (
        f"Each of {prompts} prompts, in the model's chat template, alone (batch 1), at most {study['max_new_tokens']} "
        f"new tokens, ending at end of text. After a warm-up that compiles, timed runs of each: {study['repeats']}, of "
        f"which the median counts, from the first token to the last. Speeds are all tokens of a kind over all their "
        f"time. The window pass alone is timed behind 128 committed tokens, {study['passes']} passes at a time, in "
        f"turn with plain ones. The i.i.d. prediction takes its one rate from depth 1, where a pass without a proposal "
        f"counts as a rejection; the mixture takes each prompt's own, and the per-position prediction the conditional "
        f"rates of the deepest run. Sittings: {sittings}."
    )


def _made_with(facts: Row) -> str:
    source, device = facts["source"], facts["device"]
    commit = f"{source['commit']}{' with local changes' if source['dirty'] else ''}"
    return _table(
        ("what", "value"),
        [
            ("command", f"`{' '.join(facts['command'])}`"),
            ("commit", commit),
            ("date (UTC)", facts["date_utc"]),
            ("device", f"{device['processor']}, {device['cpus']} CPUs, {device['platform']}, {device['system']}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
            ("model", f"{facts['model']['file']}, sha256 {facts['model']['sha256']}"),
            ("XLA_FLAGS", facts["xla_flags"] or "none"),
        ],
    )


def _table(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _bullets(lines: Iterable[str]) -> list[str]:
    return ["\n".join(f"- {line}" for line in lines)]
