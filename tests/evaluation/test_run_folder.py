"""A run folder is there whole or not at all; the manifest."""

import hashlib
import json
import subprocess

import pytest

from mtpjax.errors import UserError
from mtpjax.evaluation.manifest import manifest, sha256, source_version
from mtpjax.evaluation.run_folder import run_folder


def test_the_folder_gets_its_name_at_the_end(tmp_path):
    with run_folder(tmp_path / "runs" / "demo") as folder:
        (folder.work / "x").write_text("1")
        assert not folder.path.exists()
    assert (folder.path / "x").read_text() == "1"
    assert [f.name for f in folder.path.parent.iterdir()] == [folder.id]


def test_two_runs_in_one_second(tmp_path):
    with run_folder(tmp_path) as first, run_folder(tmp_path) as second:
        assert first.path != second.path


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_fails_leaves_nothing(tmp_path, error):
    def run():
        with run_folder(tmp_path / "runs" / "demo") as folder:
            (folder.work / "x").write_text("1")
            raise error

    with pytest.raises(error):
        run()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("1")
    with pytest.raises(ZeroDivisionError), run_folder(tmp_path / "runs" / "demo"):
        raise ZeroDivisionError
    assert [f.name for f in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("1")
    with (
        pytest.raises(UserError, match="file/demo: can't write a run folder there"),
        run_folder(tmp_path / "file" / "demo"),
    ):
        pytest.fail("the work must not begin")
    assert (tmp_path / "file").read_text() == "1"


def test_the_manifest(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"weights")
    facts = manifest(tmp_path / "m.gguf", command=["mtpjax", "demo"], xla_flags="--x", seeds=[3])
    json.dumps(facts)
    assert facts["model"] == {"file": "m.gguf", "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert {"python", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "mtpjax"} <= set(facts["versions"])
    assert facts["device"]["platform"] == "cpu" and facts["device"]["cpus"] >= 1
    assert (facts["xla_flags"], facts["seeds"], facts["command"]) == ("--x", [3], ["mtpjax", "demo"])


def test_the_digest_of_a_folder_names_its_files(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"a")
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "readme").write_bytes(b"")
    assert list(sha256(tmp_path)) == ["a.safetensors", "config.json"]


def test_the_commit(tmp_path):
    assert source_version(tmp_path) == {"commit": None, "dirty": None}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    found = source_version(tmp_path)
    assert len(found["commit"]) == 40 and found["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert source_version(tmp_path)["dirty"] is True
