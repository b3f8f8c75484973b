"""The tokenizer inside a GGUF file.

The file gives tokens, merges and only the *name* of the rule that cuts text before merging (`tokenizer.ggml.pre`).
That rule decides ids (SmolLM splits every digit, Llama 3 takes up to three, GPT-2 all), so an unknown name is refused
rather than replaced by a similar one. Names and rules are those of llama.cpp's vocabulary loader; `tokenizers` carries
them out, and `mtpjax.io.spm` does the SentencePiece vocabularies.

One subtlety: SmolLM's vocabulary lacks 21 of the 256 byte symbols. llama.cpp drops such a byte after merging, whereas
`tokenizers` drops it before, so that its neighbours would become neighbours of each other and might merge. The missing
symbols therefore get ids past the vocabulary, which are taken out of the result.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import tokenizers as hf
from tokenizers import pre_tokenizers as pre

from mtpjax.errors import UserError
from mtpjax.io.bpe import BYTES, END_OF_TURN, byte_level, library_splitter
from mtpjax.io.spm import BYTE_PIECE, SPACE, spm_splitter
from mtpjax.io.tokenizer import Tokenizer
from mtpjax.models.fields import Fields, shown

type Split = Callable[[str, bool], list[int]]

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)  # token types of GGUF

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASED: Final = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS: Final = (r"\p{N}", _GPT2)
_LLAMA3: Final = (_CASED.replace("DIGITS", r"\p{N}{1,3}"),)
_QWEN2: Final = (_CASED.replace("DIGITS", r"\p{N}"),)
# Name in `tokenizer.ggml.pre` -> patterns whose matches are cut out, one after the other.
PRE_TOKENIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata. UserError on anything missing, malformed or unknown."""
    fields = Fields(metadata, source)
    model = fields.text("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not _strings(tokens) or not tokens:
        raise fields.wrong("tokenizer.ggml.tokens", tokens, "a list of texts")
    types = _numbers(fields, "tokenizer.ggml.token_type", len(tokens), _NORMAL)
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "padding", "unknown", "eot", "eom"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = fields.integer(key, None, low=0)
        if value is not None and value >= len(tokens):
            raise fields.wrong(key, value, f"an id below the {len(tokens)} of the vocabulary")
        ids[name] = value
    if model == "gpt2":
        rule = fields.text("tokenizer.ggml.pre", "default")
        split, pieces = _gguf_bpe(fields, rule, tokens, types)
        add_bos, dummy_space = PRE_TOKENIZERS[rule] is _LLAMA3, False
    elif model == "llama":
        split, pieces, dummy_space = _gguf_spm(fields, tokens, types, ids["unknown"])
        add_bos = True
    else:
        raise UserError(f"{source}: tokenizer model {shown(model)} isn't supported; supported: gpt2, llama")
    add_bos = fields.boolean("tokenizer.ggml.add_bos_token", add_bos)
    bos = ids["bos"]
    if add_bos and bos is None:
        raise UserError(
            f"{source}: tokenizer.ggml.bos_token_id is missing, but the file asks for a begin-of-text token"
        )
    control = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    ends = [ids["eos"], ids["eot"], ids["eom"], *(control.get(token) for token in END_OF_TURN)]
    return Tokenizer(
        split=split,
        pieces=pieces,
        special=frozenset(i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)),
        prefix=(bos,) if add_bos and bos is not None else (),
        stop_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        bos_id=bos,
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        dummy_space=dummy_space,
        template=fields.text("tokenizer.chat_template", None),
    )


def _strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _numbers(fields: Fields, key: str, length: int, default: int) -> list[Any]:
    """A list of `length` numbers, or that often the default."""
    value = fields.get(key, None)
    if value is None:
        return [default] * length
    if getattr(value, "shape", None) != (length,):
        raise fields.wrong(key, value, f"{length} numbers, one for each token")
    return value.tolist()


def _gguf_bpe(fields: Fields, rule: str, tokens: list[str], types: list[int]) -> tuple[Split, tuple[bytes, ...]]:
    """(split, pieces) of a byte-level BPE vocabulary."""
    if rule not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"{fields.source}: pre-tokenizer {shown(rule)} isn't supported; supported: {known}")
    merges = fields.get("tokenizer.ggml.merges")
    if not _strings(merges):
        raise fields.wrong("tokenizer.ggml.merges", merges, "a list of texts")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    size = len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    vocab |= {symbol: size + i for i, symbol in enumerate(symbol for symbol in BYTES if symbol not in vocab)}
    try:
        encoder = hf.Tokenizer(hf.models.BPE(vocab, pairs, ignore_merges=PRE_TOKENIZERS[rule] is _LLAMA3))
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"{fields.source}: tokenizer.ggml.merges can't be used ({shown(str(error))})") from None
    cuts: list[Any] = [pre.Split(hf.Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[rule]]
    encoder.pre_tokenizer = pre.Sequence([*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    literal = [kind in (_UNKNOWN, _CONTROL, _USER) for kind in types]
    named = [(token, kind) for token, kind, it in zip(tokens, types, literal, strict=True) if it]
    encoder.add_tokens([hf.AddedToken(t, special=kind != _USER, normalized=False) for t, kind in named if t])
    return library_splitter(encoder, size), byte_level(tokens, literal)


def _gguf_spm(
    fields: Fields, tokens: list[str], types: list[int], unknown: int | None
) -> tuple[Split, tuple[bytes, ...], bool]:
    """(split, pieces, whether a space is put before the text) of a SentencePiece BPE vocabulary."""
    if fields.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise UserError(f"{fields.source}: tokenizer.ggml.remove_extra_whitespaces isn't supported")
    if len(fields.get("tokenizer.ggml.precompiled_charsmap", ())):
        raise UserError(f"{fields.source}: tokenizer.ggml.precompiled_charsmap (text normalisation) isn't supported")
    dummy_space = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    scores = _numbers(fields, "tokenizer.ggml.scores", len(tokens), 0)
    normal = {token: i for i, token in enumerate(tokens) if types[i] == _NORMAL}
    byte_ids: dict[int, int] = {}
    pieces: list[bytes] = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == _BYTE:
            if not (byte := BYTE_PIECE.fullmatch(token)):
                raise UserError(f"{fields.source}: token {i}, {shown(token)}, should be a byte like '<0x0A>'")
            byte_ids[int(byte[1], 16)] = i
            pieces.append(bytes([int(byte[1], 16)]))
        else:
            pieces.append((token.replace(SPACE, " ") if kind == _NORMAL else token).encode("utf-8", "replace"))
    split = spm_splitter(
        {token: scores[i] for token, i in normal.items()},
        normal,
        byte_ids,
        unknown,
        {token: i for i, token in enumerate(tokens) if types[i] == _USER},
        {token: i for i, token in enumerate(tokens) if types[i] in (_CONTROL, _UNKNOWN)},
        dummy_space=dummy_space,
    )
    return split, tuple(pieces), dummy_space
