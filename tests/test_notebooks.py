"""The notebooks run from top to bottom, and what is committed is what their sources say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs the extra `notebook`")
nbformat = pytest.importorskip("nbformat", reason="needs the extra `notebook`")
for module in ("nbclient", "ipykernel"):
    pytest.importorskip(module, reason="needs the extra `notebook`")

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def committed(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def texts(notebook):
    """Everything that a reader of the outputs sees, pictures apart."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield from [output.text] if output.output_type == "stream" else map(str, output.get("data", {}).values())


def test_there_are_notebooks():
    assert SOURCES


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_is_its_source_executed(source):
    wanted, found = jupytext.read(source).cells, committed(source).cells
    assert [(c.cell_type, c.source) for c in found] == [(c.cell_type, c.source) for c in wanted], (
        "the source has changed: `make notebooks`"
    )
    counts = [cell.execution_count for cell in found if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_committed_notebook_says_nothing_about_its_machine(source):
    notebook = committed(source)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]
    assert not [cell.id for cell in notebook.cells if "execution" in cell.metadata]
    for text in texts(notebook):
        picture = re.fullmatch(r"[A-Za-z0-9+/=\s]+", text) and len(text) > 5000
        assert picture or not re.search(r"(?<![\w<.])/(\w+/)+|[A-Z]:\\|0x[0-9a-f]{6}|Warning", text), text[:300]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_runs(source, smollm2, tmp_path):
    """Top to bottom, with the few tokens of its smoke parameters, in a kernel of this interpreter."""
    command = [sys.executable, FOLDER / "build.py", "--smoke", "--out", tmp_path, source.stem]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    executed = nbformat.read(tmp_path / f"{source.stem}.ipynb", as_version=4)
    assert [c.cell_type for c in executed.cells] == [c.cell_type for c in committed(source).cells]


def test_smoke_never_replaces_what_is_committed():
    command = [sys.executable, FOLDER / "build.py", "--smoke"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "--out" in run.stderr
