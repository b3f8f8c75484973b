"""The set-up of a bare machine: which Python is taken, when the environment is made anew, what the lock files hold."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["sh", "dirname", "cat", "cmp", "grep", "sed", "sort", "ls", "mkdir", "rm", "mv", "cp", "sleep", "tail", "kill"]


@pytest.fixture
def clone(tmp_path):
    """A bare copy of what the set-up reads."""
    folder = tmp_path / "clone"
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def bin_folder(tmp_path):
    """The one folder on PATH: a shell's tools and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        if path := shutil.which(name):
            (folder / name).symlink_to(path)
    return folder


@pytest.fixture
def bootstrap(clone, bin_folder, tmp_path):
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [bin_folder / "sh", "tools/bootstrap.sh", *arguments],
            cwd=clone,
            env={"PATH": str(bin_folder), "HOME": str(tmp_path)} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def works(path: Path) -> Path:
    return script(path, f'exec "{BASE}" "$@"')


def fails(path: Path) -> Path:
    return script(path, 'echo "pyenv: $0: command not found" >&2; exit 127')


BASE = getattr(sys, "_base_executable", sys.executable)


def test_no_python_is_one_line_and_exit_2(bootstrap, clone):
    run = bootstrap()
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1
    assert "CPython 3.12 to 3.14" in run.stderr
    assert "MTPJAX_PYTHON=" in run.stderr
    assert not (clone / ".venv").exists()
    assert not (clone / ".venv.lock").exists()


def test_a_shim_that_fails_is_passed_over(bootstrap, bin_folder):
    fails(bin_folder / "python3.14")
    assert bootstrap("python").returncode == 2
    works(bin_folder / "python3.12")
    run = bootstrap("python")
    assert (run.returncode, run.stdout.strip()) == (0, BASE)


def test_pyenv_is_searched_newest_first(bootstrap, tmp_path):
    for version in ("3.13.9", "3.12.30", "3.13.10", "3.11.7"):
        log = tmp_path / "log"
        script(tmp_path / "pyenv" / "versions" / version / "bin" / "python", f"echo {version} >>{log}; exit 1")
    assert bootstrap("python", PYENV_ROOT=str(tmp_path / "pyenv")).returncode == 2
    order = (tmp_path / "log").read_text().split()
    assert order == ["3.13.10", "3.13.9", "3.12.30", "3.11.7"]
    works(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python")
    assert bootstrap("python").stdout.strip() == BASE


def test_uv_is_the_last_resort(bootstrap, bin_folder):
    script(bin_folder / "uv", f'[ "$1 $2" = "python find" ] && [ -n "$UV_PYTHON_INSTALL_DIR" ] && echo "{BASE}"')
    assert bootstrap("python").returncode == 2
    script(bin_folder / "uv", f'case "$2" in install) ;; find) [ -n "$UV_PYTHON_INSTALL_DIR" ] && echo "{BASE}";; esac')
    assert bootstrap("python").stdout.strip() == BASE


def test_a_named_python_is_the_only_one_tried(bootstrap, bin_folder, tmp_path):
    works(bin_folder / "python3.13")
    assert bootstrap("python", MTPJAX_PYTHON=str(fails(tmp_path / "mine"))).returncode == 2
    assert bootstrap("python", MTPJAX_PYTHON=str(works(tmp_path / "mine"))).stdout.strip() == BASE


def test_a_finished_environment_is_left_alone(bootstrap, clone):
    finish(clone)
    run = bootstrap()
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("change", ["lock", "model", "interrupted", "moved", "broken"])
def test_an_environment_is_made_anew_when_what_it_was_made_from_changes(bootstrap, clone, change):
    finish(clone)
    match change:
        case "lock" | "model":
            with (clone / "requirements" / f"{change}.txt").open("a") as file:
                file.write("# another\n")
        case "interrupted":
            (clone / ".venv" / "stamp-packages").unlink()
        case "moved":
            stamp = clone / ".venv" / "stamp-packages"
            stamp.write_text(f"/elsewhere\n{stamp.read_text().partition('\n')[2]}")
        case "broken":
            (clone / ".venv" / "bin" / "python").unlink()
    run = bootstrap()
    assert run.returncode == 2, "there is no Python to make it anew with, and it was to be made anew"
    assert "no usable Python" in run.stderr


def test_the_lock_of_a_run_that_died_is_taken_over(bootstrap, clone):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (clone / ".venv.lock").mkdir()
    (clone / ".venv.lock" / "pid").write_text(f"{dead.pid}\n")
    assert bootstrap().returncode == 2
    assert not (clone / ".venv.lock").exists()


def finish(clone: Path) -> None:
    """What a finished set-up leaves, but for the packages."""
    works(clone / ".venv" / "bin" / "python")
    parts = [
        f"{clone.resolve()}\n",
        *((clone / "requirements" / f"{name}.txt").read_text() for name in ("lock", "model")),
    ]
    (clone / ".venv" / "stamp-packages").write_text("".join(parts))
    shutil.copy(clone / "pyproject.toml", clone / ".venv" / "stamp-project")


@pytest.mark.parametrize("name", ["lock", "model", "uv"])
def test_lock_files_hold_hashes_and_no_addresses(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert "://" not in text
    assert not re.search(r"^\s*--(?!hash=)", text, re.M)
    entries = re.split(r"\n(?=[a-z0-9])", text.strip())
    assert all(re.match(r"[a-z0-9.-]+==\S+", entry) and "--hash=sha256:" in entry for entry in entries)


def test_the_lock_file_covers_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["notebook"], *extras["dev"]]
    locked = set(re.findall(r"^([a-z0-9.-]+)==", (ROOT / "requirements" / "lock.txt").read_text(), re.M))
    assert {re.split(r"[\[<>=]", name)[0] for name in asked} - locked == set()
