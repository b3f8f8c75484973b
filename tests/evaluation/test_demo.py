"""The demo's flow on a tiny random model."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mtpjax.config import load_config, to_yaml
from mtpjax.decoding.result import Generation
from mtpjax.errors import UserError
from mtpjax.evaluation import demo, quality, throughput
from mtpjax.io.lm import load, open_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config():
    prompts = [
        {"name": "one", "prompt": "the hand and the thing"},
        {"name": "two", "prompt": "a man in the inn, an inn"},
    ]
    return demo.DemoConfig.model_validate(
        {"prompts": prompts, "passage": "the man and the hand " * 8, "max_new_tokens": 12, "depths": [0, 2],
         "fp8": {"prompts": 1, "max_new_tokens": 5}}
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config, tiny_folder, tmp_path_factory):
    """One run of the whole flow, shared: (results, folder, lines said)."""
    said = []
    jax.clear_caches()  # another file's tests may have compiled the same programs in this process
    parent = tmp_path_factory.mktemp("runs") / "demo"
    results, folder = demo.run_to_folder(
        config, tiny_folder, parent, command=["mtpjax", "demo"], xla_flags="", say=said.append
    )
    return results, folder, said


@pytest.mark.slow
def test_the_rows(run):
    results, _, said = run
    assert [row.key for row in results.rows] == [("bf16", 0), ("bf16", 2), ("fp8", 0), ("fp8", 2)]
    assert [len(row.samples) for row in results.rows] == [2, 2, 1, 1]
    assert all(len(sample.ids) <= row.max_new_tokens for row in results.rows for sample in row.samples)
    assert results.reference.identical == 2 and results.reference.compile_s > 0
    assert all(sample.stats.compile_s == 0 for row in results.rows for sample in row.samples)
    assert len(said) == 8


@pytest.mark.slow
def test_precisions_are_compared_with_the_first(run):
    first, second = run[0].precisions
    assert first.kl is None and second.kl > 0 and 0 <= second.top1_agreement <= 1
    assert first.nll == pytest.approx(second.nll, abs=0.5) and first.nll != second.nll
    assert second.bytes["weights"] < 0.6 * first.bytes["weights"] and second.bytes["scales"] > 0
    assert first.bytes["cache"] == second.bytes["cache"] > 0


@pytest.mark.slow
def test_the_files(run, config):
    _, folder, _ = run
    assert sorted(f.name for f in folder.iterdir()) == ["config.yaml", "manifest.json", "report.html", "results.json"]
    assert load_config(demo.DemoConfig, folder / "config.yaml") == config
    assert json.loads((folder / "manifest.json").read_text())["command"] == ["mtpjax", "demo"]
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert rows[0]["samples"][0]["ids"] == run[0].rows[0].samples[0].ids


@pytest.mark.slow
def test_margins_are_those_of_the_reference_at_each_of_its_tokens(run, config, tiny_folder):
    lm = load(tiny_folder, precision="bf16")
    outputs = {
        s.prompt: (Generation([s.text], [s.ids], [s.drafted], [s.pieces], [s.finish_reason], s.stats), 0.0)
        for s in run[0].reference.samples
    }
    margins = demo._margins(config, lm, outputs)
    for prompt in config.prompts:
        before = lm.tokenizer.encode(lm.tokenizer.chat(prompt.prompt))
        ids = outputs[prompt.name][0].ids[0]
        top = np.sort(np.concatenate([np.asarray(x) for _, x in quality.laws(lm, before + ids)]), axis=-1)[:, -2:]
        np.testing.assert_allclose(margins[prompt.name], (top[:, 1] - top[:, 0])[-len(ids) :], atol=1e-5)


def test_a_warm_run_is_repeated_only_while_something_compiles(tiny_folder):
    lm = load(tiny_folder, precision="f32", context=200)  # another target than those above
    out, first = throughput.generate_warm(lm, "the hand", max_new_tokens=4)
    _, second = throughput.generate_warm(lm, "the hand", max_new_tokens=4)
    assert first > 0 and second == 0 and out.stats.compile_s == 0


def test_a_prompt_that_does_not_fit_leaves_nothing(config, tiny_folder, tmp_path):
    long = config.model_copy(update={"prompts": ({"name": "long", "prompt": "x" * 300},)})
    with pytest.raises(UserError, match="context is 256"):
        demo.run_to_folder(long, tiny_folder, tmp_path / "r", command=[], xla_flags="", say=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_the_config_in_the_repository_is_the_default():
    assert load_config(demo.DemoConfig, ROOT / "configs" / "demo.yaml") == demo.DemoConfig()


def test_the_default_config_survives_yaml(tmp_path):
    (tmp_path / "c.yaml").write_text(to_yaml(demo.DemoConfig()), "utf-8")
    assert load_config(demo.DemoConfig, tmp_path / "c.yaml") == demo.DemoConfig()


def test_the_default_prompts_share_one_compiled_shape(smollm2):
    tokenizer = open_model(smollm2).tokenizer()
    config = demo.DemoConfig()
    for prompt in config.prompts:
        tokens = len(tokenizer.encode(tokenizer.chat(prompt.prompt)))
        assert tokens > 128 and tokens + config.max_new_tokens + max(config.depths) < 512


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("depths=[3, 0]", "0 first"),
        ("depths=[0, 3, 3]", "3 stands twice"),
        ("depths=[0, 9]", "less than or equal to 8"),
        ("precisions=[bf16, int4]", "unknown precision 'int4'"),
        ("precisions=[]", "at least 1"),
        ("drafter=oracle", "unknown drafter 'oracle'"),
        ("fp8.promts=1", "did you mean 'fp8.prompts'"),
        ("max_new_tokens=true", "expected"),
        ("prompts=[{name: a, prompt: ''}]", "at least 1 character"),
        ("prompts=[{name: a, prompt: b}, {name: a, prompt: c}]", "'a' stands twice"),
    ],
)
def test_bad_configs(override, says):
    with pytest.raises(UserError, match=says) as error:
        load_config(demo.DemoConfig, None, [override])
    assert "\n" not in str(error.value)
