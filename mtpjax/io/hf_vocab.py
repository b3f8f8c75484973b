"""The tokenizer of a Hugging Face folder: tokenizer.json, through the library that defines it.

Encoding is the library's own. Decoding needs the bytes of each id, so the decoder that tokenizer.json describes must be
one of two kinds: byte-level (GPT-2, Llama 3, Qwen, SmolLM) or SentencePiece's with byte fallback (Llama 2, Mistral).
Others are refused by name. Cleaning up of spaces around punctuation, a relic of WordPiece, isn't done.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers as hf

from mtpjax.errors import UserError
from mtpjax.io.bpe import END_OF_TURN, byte_level, library_splitter
from mtpjax.io.hf import eos_ids, read_json, read_text
from mtpjax.io.spm import BYTE_PIECE, SPACE
from mtpjax.io.tokenizer import Tokenizer
from mtpjax.models.fields import Fields, shown


def tokenizer_from_hf(folder: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

    `config` is config.json, which with generation_config.json names the ids that end a text.
    """
    path = folder / "tokenizer.json"
    if not path.exists() and (folder / "tokenizer.model").exists():
        raise UserError(f"{folder}: has tokenizer.model only; tokenizer.json is needed (save it with a fast tokenizer)")
    described = read_json(path)
    settings_path = folder / "tokenizer_config.json"
    settings = Fields(read_json(settings_path) if settings_path.exists() else {}, str(settings_path))
    try:
        encoder = hf.Tokenizer.from_str(read_text(path))
        encoder.no_truncation()
        encoder.no_padding()
        vocab = encoder.get_vocab(with_added_tokens=True)
        without, with_special = (encoder.encode("a", add_special_tokens=flag).ids for flag in (False, True))
    except BaseException as error:  # `tokenizers` panics, and its panic is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise UserError(f"{path}: can't be used ({shown(str(error))})") from None
    added = {token.content: i for i, token in encoder.get_added_tokens_decoder().items()}
    special = frozenset(i for i, token in encoder.get_added_tokens_decoder().items() if token.special)
    pieces, dummy_space = _hf_pieces(described, vocab, frozenset(added.values()), str(path))
    ids = {name: vocab.get(_token_text(settings, f"{name}_token")) for name in ("bos", "eos", "pad")}
    ends = [*eos_ids(folder, config), *(added.get(token) for token in END_OF_TURN), ids["eos"]]
    prefix = _before(with_special, without)
    add_bos = settings.boolean("add_bos_token", None)
    if add_bos is not None:
        prefix = (ids["bos"],) if add_bos and ids["bos"] is not None else ()
    return Tokenizer(
        split=library_splitter(encoder, len(pieces)),
        pieces=pieces,
        special=special,
        prefix=prefix,
        stop_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["pad"],
        dummy_space=dummy_space,
        template=_template(folder, settings),
    )


def _hf_pieces(
    described: Mapping[str, Any], vocab: Mapping[str, int], added: frozenset[int], source: str
) -> tuple[tuple[bytes, ...], bool]:
    """(bytes of every id, whether a first space is the encoder's), by the decoder that tokenizer.json describes."""
    decoder = described.get("decoder")
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    steps = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    kinds = [step.get("type") for step in steps]
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= 2 * len(vocab) + 1024:
        raise UserError(f"{source}: the largest id is {size - 1}, but there are only {len(vocab)} tokens")
    sentencepiece = bool({"ByteFallback", "Metaspace"} & set(kinds))
    if not kinds or not set(kinds) <= {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise UserError(
            f"{source}: decoder {shown(kinds)} isn't supported; supported: ByteLevel, ByteFallback, Metaspace"
        )

    ordered = [""] * size
    for token, i in vocab.items():
        ordered[i] = token
    literal = [i in added for i in range(size)]
    if not sentencepiece:
        return byte_level(ordered, literal), False
    return _sentencepiece(ordered, literal), any(map(_takes_space_away, steps))


def _takes_space_away(step: Mapping[str, Any]) -> bool:
    """Whether a step of the decoder drops the space in front of a text."""
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True) is not False
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1


def _sentencepiece(tokens: list[str], literal: list[bool]) -> tuple[bytes, ...]:
    """Bytes of SentencePiece tokens: `<0x0A>` is a byte, ▁ a space; those marked literal mean themselves."""
    return tuple(
        token.encode("utf-8", "replace")
        if plain
        else bytes([int(byte[1], 16)])
        if (byte := BYTE_PIECE.fullmatch(token))
        else token.replace(SPACE, " ").encode("utf-8", "replace")
        for token, plain in zip(tokens, literal, strict=True)
    )


def _token_text(settings: Fields, key: str) -> str:
    """A token named in tokenizer_config.json, as text or as {"content": text}; "" when there is none."""
    value = settings.get(key, "")
    if isinstance(value, dict):
        value = value.get("content", "")
    if not isinstance(value, str):
        raise settings.wrong(key, value, "a text")
    return value


def _template(folder: Path, settings: Fields) -> str | None:
    """The chat template: a file of its own, or a setting, which may be a list of named ones (`default` is taken)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    value = settings.get("chat_template", None)
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise settings.wrong("chat_template", value, "a text, or a list with one named default")
    return value


def _before(whole: list[int], part: list[int]) -> tuple[int, ...]:
    """The ids that come before `part` in `whole`; () if they aren't found to."""
    starts = (i for i in range(len(whole) - len(part) + 1) if part and whole[i : i + len(part)] == part)
    return tuple(whole[: next(starts, 0)])
