"""What byte-level BPE vocabularies have in common, whether they come from a GGUF file or from tokenizer.json."""

import threading
from collections.abc import Callable, Iterable
from typing import Final

import tokenizers as hf

# Control tokens that end a turn or a text in the common chat formats, where the file doesn't list all of them.
END_OF_TURN: Final = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<EOT>",
)  # fmt: skip


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte, as character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES: Final = byte_alphabet()


def byte_level(tokens: Iterable[str], literal: Iterable[bool]) -> tuple[bytes, ...]:
    """Bytes of byte-level tokens. Those marked literal, or with characters that stand for no byte, mean themselves."""
    known = BYTES.keys()
    return tuple(
        token.encode("utf-8", "replace") if plain or not known >= set(token) else bytes([BYTES[char] for char in token])
        for token, plain in zip(tokens, literal, strict=True)
    )


def library_splitter(encoder: hf.Tokenizer, size: int) -> Callable[[str, bool], list[int]]:
    """The `split` function of a `Tokenizer` that works through the library; ids from `size` on are left out."""
    lock = threading.Lock()  # the library keeps the switch for special tokens as state of the encoder

    def split(text: str, special: bool) -> list[int]:
        with lock:
            encoder.encode_special_tokens = not special  # True: write them as characters
            ids = encoder.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < size]

    return split
