"""The rows' figures as text, the same for terminal and report."""

from mtpjax.evaluation.records import DemoResults, Row, Sample, gain
from mtpjax.evaluation.repetition import repetition

MB = 1e6
LEGEND = (
    "Speeds and first token: median over the prompts. Compiling is in no other figure. τ: tokens that a pass commits. "
    "v: cost of a pass in passes of plain decoding. By position: accepted of what was proposed there; conditional: "
    "given those before. Histogram: drafts of which 0, 1, … tokens were accepted. Same texts, KL, top-1: against the "
    "first row."
)


def row_name(row: Row) -> str:
    """`bf16 · depth 3`."""
    return f"{row.precision} · depth {row.depth}"


def describe(sample: Sample) -> str:
    """How far a sample agrees with the reference."""
    same = sample.agreement
    if same.first_difference is None:
        return f"all {same.compared} tokens as in the reference"
    margin = f", at a top-2 margin of {same.margin:.3g}" if same.margin is not None else ""
    return f"leaves the reference after {same.equal} of {same.compared} tokens{margin}"


def table_rows(results: DemoResults) -> list[tuple[str, list[str]]]:
    """Every figure of every row as text: (what, one value a row)."""
    rows = results.rows
    gains = [gain(row, plain) if (plain := results.plain(row)) else None for row in rows]
    figures = [results.precision(row.precision) for row in rows]
    totals = [row.total for row in rows]
    repeats = [repetition([sample.ids for sample in row.samples]) for row in rows]
    return [
        ("prompts × tokens", [f"{len(row.samples)} × {row.max_new_tokens}" for row in rows]),
        ("decode, tok/s", [f"{row.tok_s.median:.1f}" for row in rows]),
        ("  range", [f"{row.tok_s.low:.1f} … {row.tok_s.high:.1f}" for row in rows]),
        ("first token, ms", [f"{row.first_token_ms.median:.0f}" for row in rows]),
        ("one pass, ms", [f"{row.pass_ms:.1f}" for row in rows]),
        ("compiling, s", [f"{row.compile_s:.1f}" for row in rows]),
        ("tokens a pass τ", [f"{t.acceptance_length:.2f}" for t in totals]),
        ("window cost v", [f"{g.cost:.2f}" if g else "" for g in gains]),
        ("gain, τ/v", [f"{g.expected:.2f}×" if g else "" for g in gains]),
        ("gain, measured", [f"{g.measured:.2f}×" if g else "" for g in gains]),
        ("accepted", [f"{t.acceptance_rate:.1%}" if t.depth else "" for t in totals]),
        ("  by position", [_rates(t.rates_unconditional) for t in totals]),
        ("  conditional", [_rates(t.rates_conditional) for t in totals]),
        ("  histogram", [" ".join(map(str, t.accept_histogram)) if t.depth else "" for t in totals]),
        ("same texts", [f"{row.identical} of {len(row.samples)}" for row in rows]),
        ("weights, MB", [f"{f.bytes['weights'] / MB:.1f}" for f in figures]),
        ("scales, MB", [f"{f.bytes['scales'] / MB:.2f}" for f in figures]),
        ("cache, MB", [f"{f.bytes['cache'] / MB:.1f}" for f in figures]),
        ("loss, nats/token", [f"{f.nll:.4f}" for f in figures]),
        ("KL, nats/token", [f"{f.kl:.4f}" if f.kl is not None else "" for f in figures]),
        ("top-1 agreement", [f"{f.top1_agreement:.1%}" if f.top1_agreement is not None else "" for f in figures]),
        *((name, [f"{found[name]:.3f}" for found in repeats]) for name in repeats[0]),
    ]


def memory_rows(results: DemoResults) -> list[tuple[str, list[str]]]:
    """What each precision asked for and got: (precision and group, [asked, got, tensors, MB])."""
    return [
        (f"{figures.name}  {row['group']}", [row["asked"], row["got"], str(row["tensors"]), f"{row['bytes'] / MB:.3f}"])
        for figures in results.precisions
        for row in figures.memory
    ]


def _rates(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
