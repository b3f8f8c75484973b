"""What the demo's figures say, in sentences, the unfavourable ones too. Terminal and report print the same."""

from mtpjax.evaluation.records import DemoResults, Row, gain
from mtpjax.evaluation.repetition import seq_rep

LOOPS_FROM = 0.3
"""seq-rep-4 from which a text is said to repeat itself."""


def findings(results: DemoResults) -> list[str]:
    """One sentence or two for each thing worth knowing before the tables are read."""
    speculative = [row for row in results.rows if row.depth]
    said = [_speed(row, plain, results.platform) for row in speculative if (plain := results.plain(row))]
    said += [_prompts(row) for row in speculative if row.precision == results.reference.precision]
    said += [_loops(row) for row in speculative if row.precision == results.reference.precision]
    said += [_identity(results, row) for row in speculative if row.precision == results.reference.precision]
    for figures in results.precisions[1:]:
        said += [
            _memory(results, figures.name),
            _precision_speed(results, figures.name),
            _quality(results, figures.name),
        ]
    return [line for line in said if line]


def signed(value: float, form: str) -> str:
    """A number with its sign, and a minus that is as wide as the plus."""
    return format(value, form).replace("-", "\N{MINUS SIGN}")


def _speed(row: Row, plain: Row, platform: str) -> str:
    found = gain(row, plain)
    name = f"{row.precision}, depth {row.depth}"
    text = (
        f"{name} decodes {found.measured:.2f}× as fast as plain decoding (median over prompts): a pass commits "
        f"{found.tokens:.2f} tokens and costs {found.cost:.2f} plain passes"
    )
    if found.measured < 1:
        text += ", so here speculation does not pay"
    if 0 < found.cost < 0.95 and platform == "cpu":
        text += (
            ". That a window is the cheaper pass is a weakness of the plain one (XLA on the CPU runs products of a "
            f"single row slowly), so {1 / found.cost:.2f}× of the gain is not speculation's merit"
        )
    return text + "."


def _prompts(row: Row) -> str:
    ranked = sorted(row.samples, key=lambda sample: sample.stats.acceptance_length)
    worst, best = ranked[0], ranked[-1]
    if worst is best:
        return ""
    return (
        f"How much lookup helps depends on the text: {best.stats.acceptance_length:.2f} tokens a pass for "
        f"“{best.prompt}”, {worst.stats.acceptance_length:.2f} for “{worst.prompt}”."
    )


def _loops(row: Row) -> str:
    looping = [sample.prompt for sample in row.samples if seq_rep(sample.ids, 4) >= LOOPS_FROM]
    if not looping:
        return ""
    names = " and ".join(f"“{name}”" for name in looping)
    return (
        f"The model repeats itself in {names} (at least {LOOPS_FROM:.0%} of the 4-grams come back), with and without "
        "speculation. Repetition is easy to draft, so acceptance there flatters the drafter."
    )


def _identity(results: DemoResults, row: Row) -> str:
    differing = [sample for sample in row.samples if sample.agreement.first_difference is not None]
    name = f"{row.precision}, depth {row.depth}"
    if not differing:
        return f"{name} gives the very tokens of plain decoding in all {len(row.samples)} prompts."
    places = ", ".join(f"“{sample.prompt}” at token {sample.agreement.equal + 1}" for sample in differing)
    margins = [sample.agreement.margin for sample in differing if sample.agreement.margin is not None]
    ties = f", where plain decoding's two best tokens were at most {max(margins):.3g} logits apart" if margins else ""
    return (
        f"{name} gives the very tokens of plain decoding in {row.identical} of {len(row.samples)} prompts. The others "
        f"part from it ({places}){ties}: the rule is lossless, but products round differently at another window width, "
        "and a near-tie may then fall the other way."
    )


def _memory(results: DemoResults, name: str) -> str:
    first, other = results.precisions[0], results.precision(name)
    before, after = (f.bytes["weights"] + f.bytes["scales"] for f in (first, other))
    change = after / before - 1
    return (
        f"{name} weights and scales take {after / 1e6:,.0f} MB, those of {first.name} {before / 1e6:,.0f} MB "
        f"({signed(change, '+.0%')}). The cache stays in the dtype of the computation."
    )


def _precision_speed(results: DemoResults, name: str) -> str:
    row, plain = results.row(name, 0), results.reference
    if row is None:
        return ""
    ratio = row.pass_ms / plain.pass_ms if plain.pass_ms else 0.0
    text = f"A plain pass takes {row.pass_ms:.0f} ms in {name}, {plain.pass_ms:.0f} ms in {plain.precision}"
    if ratio > 1.1 and name == "fp8" and results.platform == "cpu":
        text += (
            f": {ratio:.1f}× as long. XLA on the CPU has no FP8 product; it converts every weight into a larger buffer "
            "before each pass, which costs more than the bytes saved"
        )
    short = len(row.samples) < len(plain.samples) or row.max_new_tokens < plain.max_new_tokens
    if short:
        text += (
            f". Its rows therefore ran only {len(row.samples)} of {len(plain.samples)} prompts and at most "
            f"{row.max_new_tokens} of {plain.max_new_tokens} tokens"
        )
    return text + "."


def _quality(results: DemoResults, name: str) -> str:
    first, other = results.precisions[0], results.precision(name)
    text = f"{name} changes the loss of the passage by {signed(other.nll - first.nll, '+.4f')} nats/token"
    if other.kl is not None and other.top1_agreement is not None:
        text += (
            f"; its law is {other.kl:.4f} nats/token (KL) from that of {first.name}, with the same most likely token "
            f"at {other.top1_agreement:.1%} of {results.passage_tokens - 1} places"
        )
    return text + "."
