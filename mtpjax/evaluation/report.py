"""The demo's results as one HTML file: no scripts, nothing fetched, light and dark.

Model output, prompts and names are text of unknown origin: everything that did not come from this file is escaped, and
the page forbids itself to load or run anything.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from mtpjax.evaluation import figures
from mtpjax.evaluation.figures import Bar, Positions, Stack
from mtpjax.evaluation.findings import findings, signed
from mtpjax.evaluation.records import DemoResults, PromptText, Row, Sample, gain
from mtpjax.evaluation.tables import LEGEND, MB, describe, memory_rows, row_name, table_rows
from mtpjax.evaluation.throughput import Spread

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title><style>{css}</style></head>
<body><main>{body}</main></body></html>
"""
METHOD = """\
Each prompt is put into the model's chat template and continued alone (batch 1), greedily, up to the row's token limit
or the end of the text. A run in which anything had to be compiled is a warm-up and is made again; compile time is in
no other figure. The depths take turns on each prompt, so that a machine that slows down slows them alike.

Decoding speed leaves out the first token, whose time is given apart (prompt pass and first choice). One pass is the
target's, with the drafter and the bookkeeping around it. v is the cost of a pass over the drafts in passes of plain
decoding, τ the tokens that such a pass commits; speculation pays where τ is larger than v.

Loss, KL and top-1 agreement are teacher-forced on a text written for this purpose. Repetition is over the tokens
generated, so rows with other budgets are not comparable in it: rep-4, tokens that stand among the four before them;
seq-rep-4, 4-grams that come back; distinct-n, different n-grams among all."""
SERIES = 4
HISTOGRAM = ("s1l", "s0l", "s2l", "s2", "s0", "s3l", "s3", "s1", "s1l")


def render(results: DemoResults, manifest: Mapping[str, Any]) -> str:
    """The whole page."""
    sections = [
        _header(results, manifest),
        _tiles(results),
        _section("What it says", _list(findings(results))),
        _section("Figures", f'<div class="figures">{"".join(_figures(results))}</div>'),
        _section("The texts", _texts_intro(results), *[_prompt(results, prompt) for prompt in results.prompts]),
        _section(
            "Every figure",
            f'<p class="soft">{escape(LEGEND)}</p>',
            _table(["", *map(row_name, results.rows)], table_rows(results)),
        ),
        _section(
            "Bytes asked for and got",
            "<p>Read from the arrays themselves.</p>",
            _table(["", "asked", "got", "arrays", "MB"], memory_rows(results)),
        ),
        _section("How it was measured", _method(results), _facts(manifest)),
    ]
    css = (resources.files("mtpjax.evaluation") / "data" / "report.css").read_text("utf-8")
    title = f"mtpjax demo: {results.model}"
    return PAGE.format(title=escape(title), css=css, body="\n".join(sections))


def _header(results: DemoResults, manifest: Mapping[str, Any]) -> str:
    device = manifest["device"]
    day = manifest["date_utc"][:10]
    where = f"{device['processor']}, {device['cpus']} CPUs" if device["platform"] == "cpu" else device["kind"]
    return (
        f"<h1>One model, plain and speculative, in {escape(_and([f.name for f in results.precisions]))}</h1>"
        f'<p class="lead">{escape(results.model)}, {results.n_params / 1e6:,.0f} M parameters. Greedy decoding, one '
        f"prompt at a time, on {escape(where)}. {escape(day)}.</p>"
    )


def _tiles(results: DemoResults) -> str:
    tiles: list[tuple[str, str, str]] = []
    first = results.precisions[0]
    row = next((row for row in reversed(results.rows) if row.precision == first.name and row.depth), None)
    plain = results.plain(row) if row else None
    if row and plain:
        speeds = f"{plain.tok_s.median:.1f} → {row.tok_s.median:.1f} tok/s in {row.precision}"
        tiles.append((f"Speed at depth {row.depth}", f"{gain(row, plain).measured:.2f}×", speeds))
        rate = f"of at most {row.depth + 1}; {row.total.acceptance_rate:.0%} of the drafts accepted"
        tiles.append(("Tokens a pass", f"{row.total.acceptance_length:.2f}", rate))
    for figures_ in results.precisions[1:]:
        before, after = (f.bytes["weights"] + f.bytes["scales"] for f in (first, figures_))
        against = f"{signed(after / before - 1, '+.0%')} against {first.name}, scales included"
        tiles.append((f"{figures_.name} weights", f"{after / MB:,.0f} MB", against))
        change = signed(figures_.nll - first.nll, "+.3f")
        tiles.append((f"{figures_.name} loss", change, f"nats/token against {first.name}, {first.nll:.3f}"))
    inside = "".join(
        f'<div class="tile"><em>{escape(what)}</em><b>{escape(value)}</b><span>{escape(note)}</span></div>'
        for what, value, note in tiles
    )
    return f'<div class="tiles">{inside}</div>'


def _figures(results: DemoResults) -> list[str]:
    speculative = [row for row in results.rows if row.depth]
    drawn = [
        _figure(
            "Decoding speed",
            "Median over the prompts, tokens a second; each dot is one prompt.",
            figures.bars([_bar(results, row, row.tok_s, ".1f") for row in results.rows], "tok/s"),
        ),
        _figure(
            "Time to first token",
            "Median over the prompts, milliseconds; compilation apart.",
            figures.bars([_bar(results, row, row.first_token_ms, ".0f") for row in results.rows], "ms"),
        ),
    ]
    if speculative:
        drawn += [
            _figure(
                "Acceptance by position",
                "Bars: accepted of what was proposed there. Ticks: accepted given that all before were.",
                figures.positions([_positions(results, row) for row in speculative]),
            ),
            _figure(
                "Tokens accepted per draft",
                "Share of the drafts of which so many tokens were accepted; behind it the number of drafts.",
                figures.stacks([_histogram(row) for row in speculative]),
            ),
        ]
    drawn += [
        _figure(
            "Bytes in memory",
            f"Weights, scales of FP8, and a cache of {results.capacity} tokens, in MB.",
            figures.stacks([_bytes(results, name.name) for name in results.precisions]),
        ),
        _figure(
            "Loss of a fixed text",
            f"Nats a token over {results.passage_tokens - 1} tokens; lower is better.",
            figures.bars([_loss(results, i) for i in range(len(results.precisions))], "nats"),
        ),
    ]
    if len(results.rows) > 1:
        says = f"Leading tokens equal to those of {row_name(results.reference)}, of those that can be compared."
        drawn.append(_figure("Agreement", says, _agreement(results), full=True))
    return drawn


def _bar(results: DemoResults, row: Row, found: Spread, form: str) -> Bar:
    return Bar(row_name(row), found.median, format(found.median, form), _colour(results, row), found.values)


def _positions(results: DemoResults, row: Row) -> Positions:
    total = row.total
    return Positions(row_name(row), total.rates_unconditional, total.rates_conditional, _colour(results, row))


def _bytes(results: DemoResults, name: str) -> Stack:
    kinds = results.precision(name).bytes
    colours = {"weights": "s0", "scales": "s3", "cache": "s2l"}
    parts = tuple((kind, size / MB, f"{size / MB:,.0f}", colours[kind]) for kind, size in kinds.items())
    return Stack(name, parts, f"{sum(kinds.values()) / MB:,.0f} MB")


def _loss(results: DemoResults, i: int) -> Bar:
    figures_ = results.precisions[i]
    return Bar(figures_.name, figures_.nll, f"{figures_.nll:.4f}", f"s{i % SERIES}")


def _histogram(row: Row) -> Stack:
    counts = row.total.accept_histogram
    all_ = sum(counts) or 1
    parts = tuple(
        (f"{i}", count / all_, f"{count / all_:.0%}", HISTOGRAM[i % len(HISTOGRAM)]) for i, count in enumerate(counts)
    )
    return Stack(row_name(row), parts, f"{sum(counts)}")


def _agreement(results: DemoResults) -> str:
    def cell(row: Row, prompt: str) -> tuple[float, str] | None:
        sample = _sample(row, prompt)
        return (sample.agreement.share, f"{sample.agreement.equal}/{sample.agreement.compared}") if sample else None

    names = [prompt.name for prompt in results.prompts]
    rows = [(row_name(row), [cell(row, name) for name in names], _colour(results, row)) for row in results.rows[1:]]
    return figures.shares(names, rows)


def _texts_intro(results: DemoResults) -> str:
    cut = '<span class="cut">▸</span>'
    return (
        f"<p><mark>Marked tokens</mark> are accepted drafts of the {escape(results.drafter)} drafter; the others are "
        f"the model's own. {cut} stands where a text first differs from {escape(row_name(results.reference))}.</p>"
    )


def _prompt(results: DemoResults, prompt: PromptText) -> str:
    shown = [(row, sample) for row in results.rows if (sample := _sample(row, prompt.name))]
    cards = "".join(_card(row, sample, row is not results.reference) for row, sample in shown)
    return (
        f'<section class="prompt"><header><h3>{escape(prompt.name)}</h3><span class="soft">{escape(prompt.why)}</span>'
        f"</header><details><summary>the prompt, {prompt.tokens} tokens with the chat template</summary>"
        f'<pre>{escape(prompt.prompt)}</pre></details><div class="texts">{cards}</div></section>'
    )


def _card(row: Row, sample: Sample, against: bool) -> str:
    facts = [f"{len(sample.ids)} tokens", f"{sample.stats.decode_tok_s:.1f} tok/s"]
    if row.depth:
        facts.append(f"{sample.stats.acceptance_length:.2f} a pass")
    facts.append("end of text" if sample.finish_reason == "stop" else "cut at the limit")
    lines = [" · ".join(facts)] + ([describe(sample)] if against else [])
    return (
        f'<div class="text"><div class="name">{escape(row_name(row))}</div>'
        f'<div class="body">{marked(sample)}</div><div class="facts">{"<br>".join(map(escape, lines))}</div></div>'
    )


def marked(sample: Sample) -> str:
    """The text of a sample: accepted drafts marked, the first difference from the reference pointed at; escaped."""
    parts: list[str] = []
    inside = False
    for i, (piece, accepted) in enumerate(zip(sample.pieces, sample.drafted, strict=True)):
        if i == sample.agreement.first_difference:
            parts.append(("</mark>" if inside else "") + '<span class="cut">▸</span>')
            inside = False
        if accepted != inside and piece:
            parts.append("<mark>" if accepted else "</mark>")
            inside = accepted
        parts.append(escape(piece))
    return "".join(parts) + ("</mark>" if inside else "")


def _method(results: DemoResults) -> str:
    text = f"{METHOD}\n\nThe reference of every comparison is {row_name(results.reference)}."
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n"))


def _facts(manifest: Mapping[str, Any]) -> str:
    source, device, model = manifest["source"], manifest["device"], manifest["model"]
    commit = source["commit"] or "no checkout"
    digest = model["sha256"]
    machine = (device["platform"], device["kind"], device["processor"], f"{device['cpus']} CPUs", device["system"])
    facts = {
        "date": manifest["date_utc"],
        "command": " ".join(manifest["command"]),
        "commit": f"{commit}{' with changes' if source['dirty'] else ''}",
        "versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items() if version),
        "device": ", ".join(machine),
        "XLA flags": manifest["xla_flags"] or "none",
        "seeds": ", ".join(map(str, manifest["seeds"])),
        "model file": model["file"],
        "sha256": digest
        if isinstance(digest, str)
        else ", ".join(f"{name}: {value}" for name, value in digest.items()),
    }
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f"<dl>{inside}</dl>"


def _colour(results: DemoResults, row: Row) -> str:
    """A hue for each precision; the lighter tint is plain decoding."""
    hue = [figures_.name for figures_ in results.precisions].index(row.precision) % SERIES
    return f"s{hue}" if row.depth else f"s{hue}l"


def _sample(row: Row, prompt: str) -> Sample | None:
    return next((sample for sample in row.samples if sample.prompt == prompt), None)


def _section(title: str, *parts: str) -> str:
    return f"<h2>{escape(title)}</h2>{''.join(parts)}"


def _figure(title: str, says: str, svg: str, full: bool = False) -> str:
    named = ' class="full"' if full else ""
    return f"<figure{named}><h3>{escape(title)}</h3><figcaption>{escape(says)}</figcaption>{svg}</figure>"


def _list(lines: Sequence[str]) -> str:
    return f'<ul class="findings">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{escape(what)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for what, values in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
