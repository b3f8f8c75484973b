"""Checkpoints of a run: a pytree and what belongs to it, kept so that a kill at any moment loses nothing.

A folder holds one subfolder a step, `00000100/`, with Orbax's tree in `state/` and a `manifest.json` written last: the
caller's own JSON (`info`), the dtype and shape of every leaf, and the SHA-256 of every file. The order makes it atomic:

    write .saving-100/  ->  sync it to the disk  ->  rename it to 00000100/  ->  rename what is too old, delete that

so that a folder with a step's name is always whole, unless the disk or a person changed it afterwards. Reading checks
the manifest first and hands Orbax nothing else: Orbax itself notices a truncated file, but of one flipped bit in an
array it says nothing (tried: 1 bit of 1 MB, other weights, no error), and a template of another dtype it casts to
silently. A damaged checkpoint is moved aside with a warning and the one before it is taken.

Rejected: Orbax's own `Checkpointer`, which has the same policy of keeping the newest but neither the check nor the
fallback; one file of our own (arrays sharded over devices are Orbax's craft). The renaming needs a file system, local
or shared; an object store needs another order.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mtpjax.errors import UserError

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole: its step, its folder, the JSON saved with it, and {leaf: [dtype, shape]}."""

    step: int
    path: Path
    info: Mapping[str, Any]
    leaves: Mapping[str, Any]


def save_checkpoint(folder: Path, step: int, state: Any, info: Mapping[str, Any], keep: int = 2) -> Path:
    """Save a pytree of arrays (PRNG keys included) and some JSON as step `step`; of older ones the last `keep` stay.

    Returns when all is on the disk. Raises ValueError if that step is there already, OSError if it cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    target = folder.resolve() / f"{step:08d}"
    if target.exists():
        raise ValueError(f"there is already a checkpoint {target}")
    work = target.with_name(f".saving-{step}")
    _clean(target.parent)
    work.mkdir(parents=True)
    ocp.save(str(work / "state"), jax.tree.map(_raw, state))
    manifest = {"step": step, "info": info, "leaves": _leaves(state), "files": _hash_files(work)}
    manifest = json.loads(json.dumps(manifest))  # as it will be read: tuples are lists, every key a string
    manifest["self"] = _hash_json(manifest)
    (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync(work / MANIFEST)
    for inner in [*(path for path in work.rglob("*") if path.is_dir()), work]:
        _sync(inner)
    work.rename(target)
    _sync(target.parent)
    for old in checkpoint_steps(folder)[:-keep]:
        path = target.with_name(f"{old:08d}")
        path.rename(target.with_name(f".deleting-{old}"))
    _clean(target.parent)
    return target


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint in `folder`, whole or not, in ascending order."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and path.is_dir())


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there is none at all.

    Damaged ones that are newer are renamed to `damaged-*`, with a warning. UserError if all are damaged.
    """
    steps = checkpoint_steps(folder)
    for step in reversed(steps):
        path = folder / f"{step:08d}"
        try:
            return read_checkpoint(path)
        except UserError as error:
            aside = _free_name(folder / f"damaged-{step:08d}")
            path.rename(aside)
            warnings.warn(f"{error}; it is now {aside.name}, and an older one is looked for", stacklevel=2)
    if steps or any(folder.glob("damaged-*")):
        raise UserError(f"{folder}: every checkpoint is damaged; move that folder away to start afresh")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Check one checkpoint's manifest and files. UserError, naming the file, if anything is missing or changed."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest.pop("self") == _hash_json(manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        whole, manifest = False, {}
    if not whole:
        raise UserError(f"checkpoint {path} is damaged: its {MANIFEST} is missing or changed")
    for name, digest in manifest["files"].items():
        try:
            same = _hash_file(path / name) == digest
        except OSError:
            same = False
        if not same:
            raise UserError(f"checkpoint {path} is damaged: its file {name} is missing or changed")
    return Checkpoint(manifest["step"], path, manifest["info"], manifest["leaves"])


def restore_checkpoint(checkpoint: Checkpoint, like: Any) -> Any:
    """The pytree of a checkpoint in the structure, and on the devices, of the arrays in `like`.

    UserError, naming the first leaf, if the two differ in a name, shape or dtype: nothing is cast.
    """
    from orbax.checkpoint import v1 as ocp

    wanted, found = _leaves(like), checkpoint.leaves
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            here, there = (_describe(leaves.get(name)) for leaves in (wanted, found))
            raise UserError(f"checkpoint {checkpoint.path} does not fit: {name} is {there} in it, expected {here}")
    # Without a sharding in the template Orbax takes the one that was saved, with a warning.
    raw = jax.tree.map(_raw, like)
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), raw)
    loaded = ocp.load(str(checkpoint.path.resolve() / "state"), template)
    return jax.tree.map(_wrap, loaded, like)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _raw(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf.dtype) else leaf


def _wrap(raw: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(like)) if _is_key(like.dtype) else raw


def _leaves(tree: Any) -> dict[str, Any]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): [str(leaf.dtype), list(leaf.shape)] for path, leaf in flat}


def _describe(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf[0]}{leaf[1]}"


def _hash_files(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digests[path.relative_to(folder).as_posix()] = _hash_file(path)
        _sync(path)
    return digests


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_json(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clean(folder: Path) -> None:
    """Delete what a kill left half written or half deleted."""
    for pattern in (".saving-*", ".deleting-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{number}") for number in range(1, 1000))
    return path if not path.exists() else next(name for name in names if not name.exists())
