"""The rooms of the package: imports point down the list in pyproject.toml, and each file keeps to its size."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "mtpjax").rglob("*.py"))


def test_imports_point_down():
    linter = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_folder_is_a_package():
    """One without `__init__.py` would be left out of the wheel's type information and of the test above."""
    assert [file for file in SOURCES if not (file.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_keep_to_the_house_rules(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 420, "split it by concern"
    if "models" not in file.parts:
        assert "flax.linen" not in text
        assert "from flax import linen" not in text
    if file.name not in ("cli.py", "__main__.py"):
        assert "os.environ" not in text
        assert "getenv" not in text
        assert "sys.argv" not in text
