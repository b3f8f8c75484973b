"""The rows' figures as text, the same for terminal and report."""

from mtpjax.evaluation.records import DemoResults, Row, Sample, gain
from mtpjax.evaluation.repetition import repetition

MB = 1e6


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
        ("prompts × most tokens", [f"{len(row.samples)} × {row.max_new_tokens}" for row in rows]),
        ("decode, tok/s (median)", [f"{row.tok_s.median:.1f}" for row in rows]),
        ("  least … greatest", [f"{row.tok_s.low:.1f} … {row.tok_s.high:.1f}" for row in rows]),
        ("first token, ms (median)", [f"{row.first_token_ms.median:.0f}" for row in rows]),
        ("one pass, ms", [f"{row.pass_ms:.1f}" for row in rows]),
        ("compiling, s (apart)", [f"{row.compile_s:.1f}" for row in rows]),
        ("tokens a pass τ", [f"{t.acceptance_length:.2f}" for t in totals]),
        ("cost of a window v", [f"{g.cost:.2f}" if g else "" for g in gains]),
        ("gain expected, τ/v", [f"{g.expected:.2f}×" if g else "" for g in gains]),
        ("gain measured (median)", [f"{g.measured:.2f}×" if g else "" for g in gains]),
        ("acceptance rate", [f"{t.acceptance_rate:.1%}" if t.depth else "" for t in totals]),
        ("  by position", [_rates(t.rates_unconditional) for t in totals]),
        ("  given those before", [_rates(t.rates_conditional) for t in totals]),
        ("drafts, 0, 1, … accepted", [" ".join(map(str, t.accept_histogram)) if t.depth else "" for t in totals]),
        ("texts as the reference", [f"{row.identical} of {len(row.samples)}" for row in rows]),
        ("weights, MB", [f"{f.bytes['weights'] / MB:.1f}" for f in figures]),
        ("scales, MB", [f"{f.bytes['scales'] / MB:.2f}" for f in figures]),
        (f"cache of {results.capacity}, MB", [f"{f.bytes['cache'] / MB:.1f}" for f in figures]),
        ("loss, nats/token", [f"{f.nll:.4f}" for f in figures]),
        ("KL to the reference", [f"{f.kl:.4f}" if f.kl is not None else "" for f in figures]),
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
