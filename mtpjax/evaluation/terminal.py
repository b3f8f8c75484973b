"""The demo's results for a terminal; without one the same text comes plain."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mtpjax.evaluation.findings import findings
from mtpjax.evaluation.records import DemoResults, Row
from mtpjax.evaluation.tables import LEGEND, describe, table_rows

ACCEPTED = "black on green"


def show(results: DemoResults, console: Console) -> None:
    """Print findings, the table of rows and the texts."""
    for row in _texts_of(results):
        _show_texts(results, row, console)
    console.print(_table(results))
    console.print(Text(LEGEND, style="dim"))
    console.print()
    for line in findings(results):
        console.print(Text("• " + line))


def printable(text: str) -> str:
    """Text of a model without what could steer a terminal: control characters are shown as their symbols."""
    return "".join(c if c in "\n\t" or ord(c) >= 0xA0 or 0x20 <= ord(c) < 0x7F else _symbol(c) for c in text)


def coloured(pieces: list[str], drafted: list[bool]) -> Text:
    """A text in which accepted drafts stand out."""
    text = Text()
    for piece, accepted in zip(pieces, drafted, strict=True):
        text.append(printable(piece), style=ACCEPTED if accepted else "")
    return text


def _symbol(character: str) -> str:
    code = ord(character)
    return (
        chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
    )


def _texts_of(results: DemoResults) -> list[Row]:
    """The row whose texts are printed: the reference's precision at the greatest depth."""
    rows = [row for row in results.rows if row.precision == results.reference.precision]
    return rows[-1:]


def _show_texts(results: DemoResults, row: Row, console: Console) -> None:
    title = f"Texts of {row.precision} at depth {row.depth}"
    console.print(Rule(title, style="dim"))
    if row.depth and console.is_terminal:
        console.print(Text.assemble(("accepted drafts", ACCEPTED), "  and the target's own tokens"))
    for prompt, sample in zip(results.prompts, row.samples, strict=True):
        console.print()
        console.print(Text(prompt.name, style="bold"), Text(f"— {prompt.why}" if prompt.why else "", style="dim"))
        console.print(coloured(sample.pieces, sample.drafted))
        for other in results.rows[1:]:
            line = _compared(other, sample.prompt)
            if line:
                console.print(Text(line, style="dim"))
    console.print()


def _compared(row: Row, prompt: str) -> str:
    sample = next((s for s in row.samples if s.prompt == prompt), None)
    if sample is None:
        return ""
    return f"  {row.precision} depth {row.depth}: {describe(sample)}"


def _table(results: DemoResults) -> Table:
    table = Table(title=escape(results.model), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("", no_wrap=True)
    for row in results.rows:
        table.add_column(f"{row.precision}\ndepth {row.depth}", justify="right", no_wrap=True)
    for what, values in table_rows(results):
        table.add_row(what, *values)
    return table
