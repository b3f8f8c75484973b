"""What a run was made with: enough to repeat it, or to know why it can't be."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("mtpjax", "jax", "jaxlib", "flax", "numpy", "ml_dtypes")
WEIGHT_FILES = ("*.gguf", "*.safetensors", "*.json")


def manifest(model: Path, *, command: Sequence[str], xla_flags: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Facts of this process and machine by name; `command` and `xla_flags` come from the command line's caller."""
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "source": source_version(Path(__file__).resolve().parents[2]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "device": device(),
        "xla_flags": xla_flags,
        "seeds": list(seeds),
        "model": {"file": model.name, "sha256": sha256(model)},
    }


def device() -> dict[str, Any]:
    """The accelerator, or the processor, that JAX uses."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "devices": jax.device_count(),
        "processor": _processor(),
        "cpus": usable_cpus(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def usable_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def source_version(root: Path) -> dict[str, Any]:
    """Commit of the checkout at `root` and whether files differ from it; None for both where it is no checkout."""
    if not (root / ".git").exists():
        return {"commit": None, "dirty": None}
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return {"commit": commit or None, "dirty": None if status is None else bool(status)}


def sha256(path: Path) -> str | dict[str, str]:
    """Digest of a model file, or of every weight and JSON file of a folder."""
    if path.is_dir():
        files = sorted({file for pattern in WEIGHT_FILES for file in path.glob(pattern) if file.is_file()})
        return {file.name: _digest(file) for file in files}
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
