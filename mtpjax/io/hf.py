"""Hugging Face folders: config.json, generation_config.json and one or many safetensors files.

A sharded folder has `model.safetensors.index.json`, whose `weight_map` says which file holds which tensor. It's
believed only where the shards agree: an index that names an absent shard, or a tensor which its shard lacks, has
silently left weights unassigned elsewhere. Tensors in a shard that the index forgot are seen too (multi-token
prediction layers have been lost that way), so they're loaded or refused by name, like any other.
Pickled weights (`pytorch_model.bin`) are refused: unpickling runs code from the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from mtpjax.errors import UserError
from mtpjax.io.safetensors import SafetensorsFile, open_safetensors
from mtpjax.models.fields import Fields, shown

MAX_JSON_BYTES: Final = 64 * 2**20
INDEX: Final = "model.safetensors.index.json"


@dataclass(frozen=True)
class HFFolder:
    """An open folder: `config` is config.json, `shards` the files, `home` the shard of each tensor."""

    name: str
    config: Mapping[str, Any]
    home: Mapping[str, SafetensorsFile]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by name."""
        return {name: shard.tensors[name].shape for name, shard in self.home.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor in the dtype that the file has (see `SafetensorsFile.read`)."""
        return self.home[name].read(name)


def read_text(path: Path) -> str:
    """A text file. UserError when absent, over `MAX_JSON_BYTES`, or not UTF-8."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise UserError(f"{path}: {size} bytes, more than the {MAX_JSON_BYTES} that such a file may have")
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. UserError as `read_text`, and when it isn't JSON or no object."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid JSON ({shown(str(error))})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object at the top")
    return value


def open_hf(folder: Path) -> HFFolder:
    """Open every safetensors file of a folder and check that index and shards agree."""
    config = read_json(folder / "config.json")
    single = folder / "model.safetensors"
    if single.exists():
        shard = open_safetensors(single)
        home = dict.fromkeys(shard.tensors, shard)
    elif (folder / INDEX).exists():
        home = _sharded(folder)
    else:
        pickled = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)), None)
        if pickled:
            raise UserError(
                f"{folder / pickled}: pickled weights aren't read, since unpickling runs code from the file; "
                "convert them to safetensors"
            )
        raise UserError(f"{folder}: has neither model.safetensors nor {INDEX}")
    return HFFolder(str(folder), config, home)


def _sharded(folder: Path) -> dict[str, SafetensorsFile]:
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map")
    shards: dict[str, SafetensorsFile] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _plain(file):
            raise UserError(
                f"{index}: tensor {shown(name)} is said to be in {shown(file)}, expected the name of a file there"
            )
        if file not in shards:
            if not (folder / file).is_file():
                raise UserError(f"{index}: shard {shown(file)} is missing")
            shards[file] = open_safetensors(folder / file)
        if name not in shards[file].tensors:
            raise UserError(f"{index}: tensor {shown(name)} isn't in {shown(file)}, where it should be")
    home = {name: shards[file] for name, file in weight_map.items()}
    for file, shard in shards.items():
        for name in shard.tensors:
            if home.setdefault(name, shard) is not shard:
                raise UserError(
                    f"{index}: tensor {shown(name)} is in {shown(file)} as well as in {shown(weight_map.get(name))}"
                )
    return home


def _plain(file: str) -> bool:
    """Whether `file` names an entry of the folder itself: no separators, drive letters, NULs, or parents."""
    return file.endswith(".safetensors") and not set(file) & set("/\\:\0")


def eos_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-text ids by generation_config.json, or else by config.json; () when neither says."""
    path = folder / "generation_config.json"
    sources = [(path, read_json(path))] if path.exists() else []
    for source, values in [*sources, (folder / "config.json", config)]:
        found = Fields(values, str(source)).get("eos_token_id", [])
        ids = found if isinstance(found, list) else [found]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise Fields(values, str(source)).wrong("eos_token_id", found, "an id or a list of ids")
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()
