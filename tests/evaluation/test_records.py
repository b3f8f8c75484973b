"""Figures of rows, the report and the terminal, from results made by hand."""

import dataclasses
import io
import json
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from mtpjax.decoding.result import Stats
from mtpjax.evaluation import report, terminal
from mtpjax.evaluation.figures import Bar, bars
from mtpjax.evaluation.findings import findings
from mtpjax.evaluation.records import DemoResults, PrecisionFigures, PromptText, Row, Sample, gain, to_json
from mtpjax.evaluation.repetition import agreement
from mtpjax.evaluation.throughput import figures, pass_ms, pool, spread

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>&\"'"


def stats(depth=0, tokens=11, passes=10, decode_s=1.0, accepted=(), proposed=()):
    return Stats(
        batch=1, depth=depth, prompt_tokens=20, new_tokens=tokens, target_passes=passes, compile_s=0.0, prefill_s=0.1,
        decode_s=decode_s, num_drafts=proposed[0] if proposed else 0, num_draft_tokens=sum(proposed),
        num_accepted_tokens=sum(accepted), proposed_per_pos=tuple(proposed), accepted_per_pos=tuple(accepted),
        lossless=True, tv_per_pos=None, weight_bytes=1000, cache_bytes=64,
    )  # fmt: skip


def sample(prompt, ids, pieces, figures_, reference=None, drafted=None):
    same = agreement(ids, reference or ids, [0.25] * len(ids))
    return Sample(prompt, ids, pieces, drafted or [False] * len(ids), "length", figures_, same)


@pytest.fixture
def results():
    texts = [HOSTILE, " then", " more"]
    plain = Row("bf16", 0, 3, 1.5, (sample("a", [1, 2, 3], texts, stats()), sample("b", [1, 2, 3], texts, stats())))
    spec_stats = stats(depth=2, passes=5, decode_s=0.6, accepted=(4, 1), proposed=(5, 5))
    spec = Row(
        "bf16",
        2,
        3,
        2.5,
        (
            sample("a", [1, 2, 3], texts, spec_stats, drafted=[True, True, False]),
            sample("b", [1, 9, 3], texts, spec_stats, reference=[1, 2, 3], drafted=[False, True, True]),
        ),
    )
    eight = Row("fp8", 0, 2, 3.5, (sample("a", [1, 2], texts[:2], stats(decode_s=5.0), reference=[1, 2, 3]),))
    memory = [{"group": "mlp", "asked": "bfloat16", "got": "bfloat16", "bytes": 2_000_000, "tensors": 3}]
    small = [
        {"group": "mlp", "asked": "float8_e4m3fn", "got": "float8_e4m3fn", "bytes": 1_000_000, "tensors": 3},
        {"group": "scales", "asked": "float32", "got": "float32", "bytes": 500, "tensors": 3},
        {"group": "cache", "asked": "bfloat16", "got": "bfloat16", "bytes": 64, "tensors": 2},
    ]
    return DemoResults(
        model=HOSTILE,
        n_params=1_000_000,
        drafter="ngram",
        platform="cpu",
        prompts=(PromptText("a", HOSTILE, HOSTILE, 20), PromptText("b", "b", "", 20)),
        passage_tokens=101,
        capacity=256,
        precisions=(
            PrecisionFigures("bf16", 0.1, memory, 3.0, None, None),
            PrecisionFigures("fp8", 0.1, small, 3.1, 0.05, 0.9),
        ),
        rows=(plain, spec, eight),
    )


MANIFEST = {
    "date_utc": "2030-01-02T03:04:05+00:00",
    "command": ["mtpjax", "demo", HOSTILE],
    "source": {"commit": "abc", "dirty": True},
    "versions": {"python": "3.13", "mtpjax": None},
    "device": {
        "platform": "cpu", "kind": "cpu", "devices": 1, "processor": HOSTILE, "cpus": 2, "system": "Linux x86_64",
    },
    "xla_flags": "",
    "seeds": [0],
    "model": {"file": HOSTILE, "sha256": {"a.safetensors": "00", "config.json": "11"}},
}  # fmt: skip


def test_pool_adds_counts_and_keeps_the_largest_bytes():
    total = pool([stats(2, accepted=(4, 1), proposed=(5, 5)), stats(2, accepted=(1, 0), proposed=(2, 1))])
    assert (total.batch, total.depth, total.new_tokens, total.target_passes) == (2, 2, 22, 20)
    assert (total.accepted_per_pos, total.proposed_per_pos, total.num_drafts) == ((5, 1), (7, 6), 7)
    assert (total.weight_bytes, total.decode_s) == (1000, 2.0)
    assert total.accept_histogram == (2, 4, 1)
    assert (total.lossless, total.tv_per_pos) == (True, None)


def test_pool_adds_the_total_variation_of_a_lossy_rule():
    one = dataclasses.replace(stats(1, accepted=(4,), proposed=(5,)), lossless=False, tv_per_pos=(0.5,))
    total = pool([one, one])
    assert (total.lossless, total.tv_per_pos, total.tv_per_step) == (False, (1.0,), 1.0 / 20)


def test_times():
    assert pass_ms(stats(passes=4, decode_s=1.0)) == 250
    assert pass_ms(stats(tokens=1, passes=0, decode_s=0.0)) == 0
    assert dataclasses.astuple(spread([3.0, 1.0, 8.0])) == (3.0, 1.0, 8.0, (3.0, 1.0, 8.0))
    assert figures(stats())["decode_tok_s"] == 10


def test_gain_is_tokens_over_cost(results):
    plain, spec, _ = results.rows
    found = gain(spec, plain)
    assert found.tokens == pytest.approx(20 / 10)
    assert found.cost == pytest.approx((1.2 / 10) / (2.0 / 20))
    assert found.expected == pytest.approx(2.0 / 1.2)
    assert found.measured == pytest.approx((10 / 0.6) / 10)


def test_bytes_by_kind(results):
    assert results.precision("bf16").bytes == {"weights": 2_000_000, "scales": 0, "cache": 0}
    assert results.precision("fp8").bytes == {"weights": 1_000_000, "scales": 500, "cache": 64}


def test_json_is_valid_and_has_the_figures(results):
    found = json.loads(json.dumps(to_json(results), allow_nan=False))
    assert [row["identical_to_reference"] for row in found["rows"]] == [2, 1, 1]
    assert found["rows"][1]["samples"][1]["agreement"] == {
        "equal": 1, "compared": 3, "margin": 0.25, "share": 1 / 3, "first_difference": 1,
    }  # fmt: skip
    assert found["rows"][1]["total"]["rates_conditional"] == [0.8, 0.25]
    assert found["rows"][0]["gain"] is None
    assert found["precisions"][1]["kl"] == 0.05


def test_findings_say_what_is_unfavourable(results):
    said = " ".join(findings(results))
    assert "bf16, depth 2 decodes 1.67× as fast" in said
    assert "in 1 of 2 prompts" in said and "“b” at token 2" in said and "at most 0.25 logits apart" in said
    assert "5.0× as long" in said and "only 1 of 2 prompts and at most 2 of 3 tokens" in said
    assert "+0.1000 nats/token" in said and "−50%" in said

    plain, spec, eight = results.rows
    slow = [dataclasses.replace(s, stats=dataclasses.replace(s.stats, decode_s=4.0)) for s in spec.samples]
    slower = dataclasses.replace(results, rows=(plain, dataclasses.replace(spec, samples=tuple(slow)), eight))
    assert "decodes 0.25× as fast" in findings(slower)[0] and "does not pay" in findings(slower)[0]


def test_findings_name_texts_that_loop(results):
    plain, spec, _ = results.rows
    looping = dataclasses.replace(spec.samples[0], ids=[5] * 3 + [6] * 40)
    row = dataclasses.replace(spec, samples=(looping, spec.samples[1]))
    said = " ".join(findings(dataclasses.replace(results, rows=(plain, row))))
    assert "repeats itself in “a”" in said


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_one_well_formed_file_that_fetches_and_runs_nothing(results):
    text = report.render(results, MANIFEST)
    page = Page(text)
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action", "xlink:href")]
    assert not [a for a in page.attributes if a[1].startswith("on")]
    assert not re.search(r"https?:|url\(|@import|//", text)


def test_the_report_escapes_whatever_comes_from_outside(results):
    text = report.render(results, MANIFEST)
    assert "<script" not in text and "<img" not in text
    assert text.count("&lt;script&gt;") >= 6  # model, prompt, why, outputs, processor, command, file


def test_accepted_drafts_and_the_first_difference_are_marked(results):
    _, spec, _ = results.rows
    escaped = "&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(2)&gt;&amp;&quot;&#x27;"
    assert report.marked(spec.samples[0]) == f"<mark>{escaped} then</mark> more"
    assert report.marked(spec.samples[1]) == f'{escaped}<span class="cut">▸</span><mark> then more</mark>'


def test_the_report_of_one_plain_row(results):
    alone = dataclasses.replace(results, rows=results.rows[:1], precisions=results.precisions[:1])
    Page(report.render(alone, MANIFEST))
    assert findings(alone) == []


def test_bars_of_nothing():
    assert "<rect" in bars([Bar("x", 0.0, "0", "s0")], "tok/s")


def shown(results, **settings):
    file = io.StringIO()
    terminal.show(results, Console(file=file, width=100, highlight=False, **settings))
    return file.getvalue()


def test_the_terminal_shows_plain_text_where_there_is_none(results):
    text = shown(results)
    assert "\x1b" not in text
    assert "then more" in text and "bf16" in text and "depth 2" in text
    assert "leaves the reference after 1 of 3 tokens" in text


def test_the_terminal_colours_accepted_drafts(results):
    assert "\x1b[30;42m then" in shown(results, force_terminal=True, color_system="standard")


def test_a_text_cannot_steer_the_terminal(results):
    plain, *rest = results.rows
    steering = dataclasses.replace(rest[0].samples[0], pieces=["\x1b[2J\x07", "a\r\x9b2J", "[red]b[/red]\n\tc"])
    row = dataclasses.replace(rest[0], samples=(steering, rest[0].samples[1]))
    text = shown(dataclasses.replace(results, rows=(plain, row)))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "␛[2J␇a␍" in text and "[red]b[/red]" in text
