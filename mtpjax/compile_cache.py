"""Compiled programs kept from one start to the next, in a folder for processors like this one.

JAX's persistent compilation cache does the work. XLA's key does not tell processors apart, and a home folder or a
checkout may be shared by unlike machines, so the place is `<base>/<machine>-<hash of the processor's features>`; the
base is `.cache/mtpjax/jax` in the home folder unless another is given. Nothing is kept unless `keep_compiled` is
called: the command line does so, with `$XDG_CACHE_HOME/mtpjax/jax` where that is set (and not with
`--no-compile-cache`); a notebook may.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax

__all__ = ["keep_compiled", "processor_tag"]

# Shorter compilations cost less than reading them back.
WORTH_KEEPING_S = 0.2


def keep_compiled(base: str | Path | None = None) -> Path | None:
    """Turn JAX's persistent cache on, and return its folder.

    None, and nothing is done, where JAX was given a folder of its own or none can be made.
    """
    if jax.config.jax_compilation_cache_dir:
        return None
    folder = Path(base or Path.home() / ".cache" / "mtpjax" / "jax") / processor_tag()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
    return folder


def processor_tag() -> str:
    """A short name of the instruction set: programs compiled for another may not run."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = ""
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"
