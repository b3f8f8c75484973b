"""The command line: what it prints, where, and with which exit code."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mtpjax import cli
from mtpjax.compile_cache import processor_tag
from mtpjax.decoding.generate import generate
from mtpjax.evaluation.terminal import printable
from mtpjax.io.lm import load
from tests.io.conftest import flat_random, tiny_config, write_gguf, write_hf

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    config = tiny_config(max_context=256, n_layers=1)
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, flat_random(config))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test has an empty folder to stand in, a cache of its own, JAX as it was, and no progress lines."""
    monkeypatch.setattr("mtpjax.progress.QUIET_S", math.inf)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield here
    for name, value in before.items():
        jax.config.update(name, value)


def run_apart(*arguments, **settings):
    """The command in a process of its own, as a person starts it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-m", "mtpjax", *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, timeout=120, **settings
    )


def refused(capsys, *arguments):
    """Run a command that must be refused; the line it says."""
    assert cli.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def broken_model(folder, kind, tiny):
    config = tiny_config()
    flat = flat_random(config)
    if kind == "truncated GGUF":
        path = write_gguf(folder / "m.gguf", config, flat)
        path.write_bytes(path.read_bytes()[:-1000])
    elif kind == "truncated header":
        path = write_gguf(folder / "m.gguf", config, flat)
        path.write_bytes(path.read_bytes()[:100])
    elif kind == "no GGUF":
        path = folder / "m.gguf"
        path.write_bytes(b"GIF89a" * 100)
    elif kind == "unknown architecture":
        path = write_hf(folder / "m", config, flat, architectures=["MambaForCausalLM"])
    elif kind == "unknown rope":
        path = write_hf(folder / "m", config, flat, rope_scaling={"rope_type": "wobbly", "factor": 2.0})
    elif kind == "unsupported dtype":
        path = write_hf(folder / "m", config, flat, dtype=np.int32)
    elif kind == "truncated safetensors":
        path = write_hf(folder / "m", config, flat)
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        path = folder / "nothing.gguf"
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing", "no such file"),
        ("truncated GGUF", "m.gguf"),
        ("truncated header", "m.gguf"),
        ("no GGUF", "m.gguf"),
        ("truncated safetensors", "model.safetensors"),
        ("unknown architecture", "MambaForCausalLM"),
        ("unknown rope", "wobbly"),
        ("unsupported dtype", "I32"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "demo"])
def test_bad_models(capsys, tmp_path, elsewhere, tiny, kind, says, verb):
    model = broken_model(tmp_path, kind, tiny)
    arguments = ["generate", "--prompt", "x"] if verb == "generate" else ["demo", "--runs", elsewhere / "runs"]
    assert says in refused(capsys, *arguments, "--model", model)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x" * 400], ["400 tokens", "256"]),
        (["--prompt", ""], ["the prompt (--prompt) is empty"]),
        (["--prompt", "x", "--depth", "-1"], ["depth is -1", "0"]),
        (["--prompt", "x", "--depth", "3", "--drafter", "parrot"], ["parrot", "ngram"]),
        (["--prompt", "x", "--temperature", "-0.5"], ["temperature is -0.5"]),
        (["--prompt", "x", "--temperature", "nan"], ["temperature is nan"]),
        (["--prompt", "x", "--top-k", "-2"], ["top_k is -2"]),
        (["--prompt", "x", "--top-p", "1.5"], ["top_p is 1.5"]),
        (["--prompt", "x", "--min-p", "-1"], ["min_p is -1"]),
        (["--prompt", "x", "--seed", "-1"], ["seed is -1"]),
        (["--prompt", "x", "--max-new-tokens", "-1"], ["max_new_tokens is -1"]),
        (["--prompt", "x", "--precision", "fp4"], ["fp4", "bf16"]),
        (["--prompt-file", "no.txt"], ["no.txt", "No such file"]),
        (["--prompt", "x", "--depth", "two"], ["--depth", "'two'"]),
        (["--prompt", "x", "--prompt-file", "y"], ["not allowed with"]),
        (["--prompt", "x", "--promt", "y"], ["--promt"]),
        ([], ["--prompt"]),
    ],
)
def test_bad_requests(capsys, elsewhere, tiny, arguments, says):
    line = refused(capsys, "generate", "--model", tiny, "--no-compile-cache", *arguments)
    assert all(part in line for part in says)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["demo", "depht=3"], "did you mean 'depths'?"),
        (["demo", "--config", "no.yaml"], "no.yaml: cannot read the config"),
        (["demo", "word"], "expected key.path=value"),
        (["train", "no.yaml", "--runs", "r", "steps=1"], "no.yaml: cannot read the config"),
        (["train", str(ROOT / "configs" / "tiny_qat.yaml"), "stepz=1"], "did you mean 'steps'?"),
        (["config", "show", "no.yaml"], "no.yaml: cannot read the config"),
        (["config", "show", "demo", "fp8.promts=1"], "did you mean 'fp8.prompts'?"),
        (["config", "schema", "no"], "expected one of: demo, train"),
        (["config"], "ACTION"),
    ],
)
def test_bad_commands(capsys, elsewhere, arguments, says):
    assert says in refused(capsys, *arguments)
    assert list(elsewhere.iterdir()) == []


def test_a_config_with_an_unknown_key(capsys, elsewhere):
    (elsewhere / "c.yaml").write_text("max_new_token: 3\n")
    for arguments in (["demo", "--config", "c.yaml"], ["config", "show", "c.yaml"]):
        line = refused(capsys, *arguments)
        assert "c.yaml: unknown key 'max_new_token'; did you mean 'max_new_tokens'?" in line


@pytest.mark.parametrize("verb", ["demo", "train"])
def test_a_run_folder_that_cannot_be_written(capsys, elsewhere, tiny, verb):
    (elsewhere / "file").write_text("1")
    model = ["--model", tiny] if verb == "demo" else [ROOT / "configs" / "tiny_qat.yaml"]
    assert "file" in refused(capsys, verb, *model, "--runs", "file")
    assert [f.name for f in elsewhere.iterdir()] == ["file"]


def test_a_prompt_file_that_is_no_text(capsys, elsewhere):
    (elsewhere / "p").write_bytes(b"\xff\xfe\x00")
    assert "isn't UTF-8" in refused(capsys, "generate", "--prompt-file", "p")
    (elsewhere / "p").write_bytes(b"\n")
    assert "is empty" in refused(capsys, "generate", "--prompt-file", "p")


def test_bad_input_in_a_process_of_its_own(elsewhere):
    done = run_apart("generate", "--prompt", "x", "--model", "no.gguf")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: no.gguf: no such file or folder; expected a .gguf file or a Hugging Face model folder\n"
    )
    assert list(elsewhere.iterdir()) == []


def test_generate_streams_the_text_of_generate(capsys, tiny):
    arguments = ["--model", str(tiny), "--prompt", "the hand", "--max-new-tokens", "20", "--precision", "f32"]
    assert cli.main(["generate", *arguments]) == 0
    out, err = capsys.readouterr()
    expected = generate(load(tiny, precision="f32"), "the hand", max_new_tokens=20)
    assert out == expected.text[0] + "\n"
    assert f"{expected.stats.new_tokens} tokens" in err and "ended by" in err


def test_depth_alone_means_ngram(capsys, tiny):
    arguments = ["--model", str(tiny), "--prompt", "the hand the hand", "--max-new-tokens", "16", "--json", "--chat"]
    assert cli.main(["generate", *arguments, "--depth", "3", "--precision", "f32"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert out.count("\n") == 1 and err == ""
    expected = generate(load(tiny, precision="f32"), "the hand the hand", max_new_tokens=16, chat=True)
    assert (found["ids"], found["text"]) == (expected.ids[0], expected.text[0])
    assert found["finish_reason"] == expected.finish_reason[0]
    assert found["stats"]["depth"] == 3 and found["stats"]["new_tokens"] == len(found["ids"])


def test_sampling_settings_reach_the_sampler(capsys, tiny):
    arguments = ["--model", str(tiny), "--prompt", "the", "--max-new-tokens", "16", "--json", "--precision", "f32"]
    sampling = ["--temperature", "1.3", "--top-k", "40", "--top-p", "0.9", "--min-p", "0.01", "--seed", "5"]
    assert cli.main(["generate", *arguments, *sampling]) == 0
    found = json.loads(capsys.readouterr().out)
    lm = load(tiny, precision="f32")
    expected = generate(lm, "the", max_new_tokens=16, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, seed=5)
    assert found["ids"] == expected.ids[0]


@pytest.mark.parametrize("newline", ["", "\n", "\r\n"])
def test_a_prompt_from_standard_input(capsys, monkeypatch, tiny, newline):
    text = io.TextIOWrapper(io.BytesIO(f"the hand{newline}".encode()))
    monkeypatch.setattr(sys, "stdin", text)
    arguments = ["--model", str(tiny), "--prompt-file", "-", "--max-new-tokens", "4", "--json", "--precision", "f32"]
    assert cli.main(["generate", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["ids"]
    assert found == generate(load(tiny, precision="f32"), "the hand", max_new_tokens=4).ids[0]


def test_colours_on_a_terminal_only(capsys, monkeypatch, tiny):
    arguments = ["generate", "--model", str(tiny), "--prompt", "the hand the hand", "--max-new-tokens", "24"]
    arguments += ["--depth", "3", "--precision", "f32"]
    assert cli.main(arguments) == 0
    plain = capsys.readouterr().out
    monkeypatch.setattr(cli, "_colours", lambda: True)
    assert cli.main(arguments) == 0
    coloured = capsys.readouterr().out
    assert cli.ACCEPTED not in plain
    assert coloured.replace(cli.ACCEPTED, "").replace(cli.PLAIN, "") == printable(plain)


def test_no_color_and_pipes_are_respected(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli._colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli._colours()


def test_demo_writes_its_run_and_prints_where(capsys, elsewhere, tiny):
    small = ["precisions=[f32]", "depths=[0, 1]", "max_new_tokens=4", "prompts=[{name: a, prompt: the hand}]"]
    passage = "passage=the hand and the thing and the hand"
    assert cli.main(["demo", small[0], "--model", str(tiny), *small[1:], "--runs", "out", passage]) == 0
    out, err = capsys.readouterr()
    (run,) = (elsewhere / "out" / "demo").iterdir()
    assert {f.name for f in run.iterdir()} == {"config.yaml", "manifest.json", "results.json", "report.html"}
    assert f"report: out/demo/{run.name}/report.html" in out
    assert "\x1b" not in out and "f32" in err


@pytest.mark.parametrize(("finished", "code"), [(True, 0), (False, 130)])
def test_train_hands_config_and_folder_on(capsys, monkeypatch, finished, code):
    asked = []

    def train(config, *, run_dir):
        asked.append((config.steps, run_dir))
        return SimpleNamespace(finished=finished, message="the line it says")

    monkeypatch.setattr("mtpjax.training.fit.train", train)
    assert cli.main(["train", str(ROOT / "configs" / "tiny_qat.yaml"), "--runs", "r", "steps=7"]) == code
    assert asked == [(7, Path("r/train/tiny_qat"))]
    assert capsys.readouterr().out == "the line it says\n"


def test_config_show_and_schema(capsys):
    assert cli.main(["config", "show", "demo", "fp8.prompts=2"]) == 0
    assert "prompts: 2" in capsys.readouterr().out
    for name in ("demo.yaml", "tiny_qat.yaml"):
        assert cli.main(["config", "show", str(ROOT / "configs" / name)]) == 0
        assert capsys.readouterr().out
    assert cli.main(["config", "schema", "demo"]) == 0
    assert "max_new_tokens" in json.loads(capsys.readouterr().out)["properties"]
    assert cli.main(["config", "schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(cli.CONFIGS)


@pytest.mark.parametrize("verb", [[], ["demo"], ["generate"], ["train"], ["config"], ["config", "show"]])
def test_help(capsys, verb):
    with pytest.raises(SystemExit) as end:
        cli.main([*verb, "--help"])
    assert end.value.code == 0 and "usage: mtpjax" in capsys.readouterr().out


def test_help_and_version_do_not_wait_for_jax():
    code = "import sys; from mtpjax.cli import main\ntry: main([sys.argv[1]])\nexcept SystemExit: pass\n"
    code += "assert not {'jax', 'numpy', 'pydantic', 'rich'} & set(sys.modules)"
    for argument in ("--help", "--version"):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, argument]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert "mtpjax" in done.stdout


def test_ctrl_c_is_130(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "config_schema", interrupt)
    assert cli.main(["config", "schema"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
def test_ctrl_c_during_a_demo_leaves_nothing(elsewhere, tmp_path):
    config = tiny_config(max_context=20_000, n_layers=1)  # room for a text that lasts longer than the signal takes
    model = write_hf(tmp_path / "long", config, flat_random(config))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtpjax", "demo", "--model", str(model), "max_new_tokens=15000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert "in bf16" in run.stderr.readline()
        assert (elsewhere / "runs").exists()
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (130, "")
    assert err.endswith("interrupted\n") and "Traceback" not in err
    assert list(elsewhere.iterdir()) == []


def test_a_reader_that_goes_away_is_no_fault():
    read, write = os.pipe()
    os.close(read)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mtpjax", "config", "schema"]
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run(command, check=False, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def fail(args):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "config_schema", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["config", "schema"])


def test_compiled_programs_are_kept_where_asked(tmp_path, tiny, capsys):
    arguments = ["generate", "--model", str(tiny), "--prompt", "the", "--max-new-tokens", "3"]
    assert cli.main([*arguments, "--no-compile-cache"]) == 0
    assert jax.config.jax_compilation_cache_dir is None
    assert cli.main(arguments) == 0
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache" / "mtpjax" / "jax" / processor_tag())
    capsys.readouterr()
