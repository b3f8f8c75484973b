"""Read and write: model files, tokenizers, checkpoints."""

from mtpjax.io.lm import LM, load
from mtpjax.io.tokenizer import StreamDecoder, Tokenizer

__all__ = ["LM", "StreamDecoder", "Tokenizer", "load"]
