"""Text to batches: bytes of files, cut in windows, shuffled by a seed, resumable at any batch.

    files -> [SEP bytes SEP bytes ...] int32 -> train part | validation part -> windows [T + 1] -> batches {ids, labels}

Text. Every machine that runs this has the source of Python's own library, without a network: the modules beside
`os.py`, in the order of their names, until `max_bytes`. It is real text with long repetitions (which speculative
decoding likes) and differs a little between Python versions, so a run records its SHA-256 and a checkpoint refuses
another. `text_files` names other files instead.

Tokens. A byte is its own id; 256 separates documents. No tokenizer to learn, to ship or to mismatch.

Windows. They do not overlap in what they predict: window i reads tokens iT .. iT + T - 1 and predicts iT + 1 .. iT + T.
A label that is a separator is ignored, since the next document does not follow from this one. Attention does cross
documents inside a window, as in most pretraining; a mask per document would cost more than it teaches at this length.

Validation is the tail of the stream, other modules than those trained on, and always the same windows.

Order. grain's shuffle is a function of (seed, epoch, index), so the position of the iterator is one number, and a
resumed run sees exactly the batches that it would have seen. Rejected: random offsets from a generator (uneven cover,
its state to be saved); worker processes (the tokens are in memory, and a batch is one gather).
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import grain
import numpy as np
from pydantic import Field

from mtpjax.config import Config
from mtpjax.errors import UserError
from mtpjax.training.losses import IGNORE

SEPARATOR = 256
VOCABULARY = 257

type Batch = dict[str, np.ndarray]


class DataConfig(Config):
    """Which text, and how it is cut."""

    text_files: tuple[str, ...] = ()
    """Each file is a document, taken as bytes; relative to the working folder. None: Python's own library."""
    max_bytes: Annotated[int, Field(gt=0)] = 2_000_000
    """The text is cut off here."""
    sequence_length: Annotated[int, Field(gt=0)] = 128
    batch_size: Annotated[int, Field(gt=0)] = 16
    """Windows a step."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    validation_windows: Annotated[int, Field(gt=0)] = 256
    """At most so many windows of the validation part are used."""


@dataclass(frozen=True)
class Corpus:
    """Windows int32 [n, T + 1] to train on and to validate on; the text's SHA-256, files and bytes."""

    train: np.ndarray
    validation: np.ndarray
    sha256: str
    files: int
    bytes: int


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text and cut it. UserError: a file that cannot be read, no text, less text than one batch."""
    documents = read_documents(config.text_files, config.max_bytes)
    tokens = tokenize(documents)
    held_out = int(len(tokens) * config.validation_fraction)
    train = windows(tokens[: len(tokens) - held_out], config.sequence_length)
    validation = windows(tokens[len(tokens) - held_out :], config.sequence_length)[: config.validation_windows]
    if len(train) < config.batch_size or len(validation) == 0:
        raise UserError(
            f"the text has {len(tokens):,} tokens: {len(train)} training and {len(validation)} validation windows of "
            f"{config.sequence_length}, but a batch needs {config.batch_size} and validation 1; give more text or "
            "lower data.batch_size or data.sequence_length"
        )
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    return Corpus(train, validation, digest, len(documents), sum(map(len, documents)))


def read_documents(text_files: tuple[str, ...], max_bytes: int) -> list[bytes]:
    """The files' bytes, cut off after `max_bytes` in all; empty files are left out. UserError if nothing is left."""
    paths = [Path(name) for name in text_files] or library_files()
    documents, left = [], max_bytes
    for path in paths:
        try:
            with path.open("rb") as file:
                text = file.read(left)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"data.text_files: cannot read {path} ({reason}); expected a text file") from None
        documents.append(text)
        left -= len(text)
        if left == 0:
            break
    documents = [text for text in documents if text]
    if not documents:
        named = ", ".join(map(str, paths)) or "the library of this Python, which has no source files"
        raise UserError(f"data.text_files: no text in {named}; name files that hold some")
    return documents


def library_files() -> list[Path]:
    """The modules beside `os.py` in the running Python's library, in the order of their names."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)


def tokenize(documents: list[bytes]) -> np.ndarray:
    """Token ids int32 of all documents in one stream, a separator before each."""
    parts = [np.frombuffer(text, np.uint8).astype(np.int32) for text in documents]
    return np.concatenate([part for text in parts for part in (np.array([SEPARATOR], np.int32), text)])


def windows(tokens: np.ndarray, length: int) -> np.ndarray:
    """[n, length + 1] of int32, each sharing one token with the next; what is left at the end is dropped."""
    count = max(len(tokens) - 1, 0) // length
    return tokens[np.arange(count)[:, None] * length + np.arange(length + 1)[None, :]]


def to_batch(rows: np.ndarray) -> Batch:
    """Windows [B, T + 1] to {"ids": [B, T], "labels": [B, T]}, the label of a place being the token after it."""
    labels = rows[:, 1:]
    return {"ids": rows[:, :-1], "labels": np.where(labels == SEPARATOR, IGNORE, labels)}


def batches(train: np.ndarray, batch_size: int, seed: int) -> Any:
    """An endless grain iterator of `to_batch` results; every epoch has its own order and no window twice.

    Its `get_state()` is a small JSON dict, and `set_state` goes on from there exactly.
    """
    dataset = grain.MapDataset.source(cast(Any, train)).seed(seed).shuffle().repeat().batch(batch_size).map(to_batch)
    # The tokens are in memory: threads that read ahead would only compete for the cores that compute.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
