import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mtpjax.errors import UserError
from mtpjax.io.bpe import BYTES
from mtpjax.io.gguf import open_gguf
from mtpjax.io.gguf_vocab import PRE_TOKENIZERS, tokenizer_from_gguf
from mtpjax.io.hf_vocab import tokenizer_from_hf
from mtpjax.io.spm import merge
from mtpjax.io.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_cases.json").read_text("utf-8"))["cases"]


@pytest.fixture(scope="session")
def smollm(smollm2):
    return tokenizer_from_gguf(open_gguf(smollm2).metadata, str(smollm2))


def test_ids_equal_those_of_the_reference(smollm):
    assert len(CASES) == 78
    for case in CASES:
        assert smollm.encode(case["text"], special=case["parse_special"]) == case["ids"], case["text"]


def test_smollm_ends_and_chat(smollm):
    assert smollm.stop_ids == (2, 0)
    assert smollm.prefix == ()
    text = smollm.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert smollm.encode(text)[0] == 1
    assert smollm.decode(smollm.encode(text)) == "system\nS\nuser\nU\nassistant\n"
    assert smollm.decode(smollm.encode(text), skip_special=False) == text


def bpe(tokens, merges, rule="gpt-2", **extra):
    """A byte-level tokenizer as a GGUF file would hold it."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.ones(len(tokens or ()), np.int32),
    }
    return tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}, "test")


def test_a_byte_without_symbol_drops_out_after_merging():
    """Dropped before, a and b would become neighbours and merge."""
    tokenizer = bpe(["a", "b", "ab"], ["a b"])
    assert tokenizer.encode("ab") == [2]
    assert tokenizer.encode("axb") == [0, 1]


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", "!\n", "ab"]),
        ("default", ["It", "'", "s", " ", "123", "45", "!", "\n", "ab"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "!\n", "ab"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "!\n", "ab"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "!\n", "ab"]),
    ],
)
def test_rules_cut_differently(rule, pieces):
    """All neighbours merge, so ids show where the text was cut."""
    text = "It's 12345!\nab"
    to_symbol = {byte: symbol for symbol, byte in BYTES.items()}
    written = ["".join(to_symbol[byte] for byte in piece.encode()) for piece in pieces]
    whole = "".join(to_symbol[byte] for byte in text.encode())
    spans = sorted({whole[i:j] for i in range(len(whole)) for j in range(i + 1, len(whole) + 1)}, key=len)
    merges = [f"{span[:i]} {span[i:]}" for span in spans for i in range(1, len(span))]
    tokenizer = bpe(spans, merges, rule, bos_token_id=0, add_bos_token=False)
    expected = list(written)
    if rule in ("gpt-2", "smollm", "default"):  # "!\n": GPT-2's rule leaves the newline by itself
        expected = [part for piece in written for part in (["!", "Ċ"] if piece == "!Ċ" else [piece])]
    assert [spans[i] for i in tokenizer.encode(text)] == expected


def test_begin_of_text_rule():
    tokens = ["<s>", "a", "</s>"]
    types = np.array([3, 1, 3], np.int32)
    default = bpe(tokens, [], "llama-bpe", bos_token_id=0, eos_token_id=2, token_type=types)
    assert default.encode("a") == [0, 1]
    assert default.encode("<s>a") == [0, 1]  # never doubled
    assert default.encode("a", bos=False) == [1]
    assert default.encode("") == [0]
    off = bpe(tokens, [], "llama-bpe", bos_token_id=0, add_bos_token=False, token_type=types)
    assert off.encode("a") == [1]
    on = bpe(tokens, [], "gpt-2", bos_token_id=0, add_bos_token=True, token_type=types)
    assert on.encode("a") == [0, 1]
    assert on.encode("<s>", special=False) == [0]  # no such symbols: only the prefix is left
    assert default.stop_ids == (2,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pre": "tekken"}, "pre-tokenizer 'tekken' isn't supported; supported: default, gpt-2, smollm"),
        ({"model": "t5"}, "tokenizer model 't5' isn't supported; supported: gpt2, llama"),
        ({"tokens": None}, "'tokenizer.ggml.tokens' is missing"),
        ({"tokens": [1]}, "expected a list of texts"),
        ({"merges": ["a c"]}, "merges can't be used"),
        ({"merges": None}, "merges' is missing"),
        ({"bos_token_id": 7}, "expected an id below the 3"),
        ({"eos_token_id": -1}, "expected an integer"),
        ({"add_bos_token": True}, "bos_token_id is missing"),
        ({"add_bos_token": 1}, "expected true or false"),
        ({"token_type": [1, 1]}, "expected 3 numbers"),
    ],
)
def test_bad_vocabularies(changes, words):
    with pytest.raises(UserError, match=words) as error:
        bpe(**({"tokens": ["a", "b", "ab"], "merges": ["a b"]} | changes))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("test: ")


def test_every_rule_is_usable():
    for rule in PRE_TOKENIZERS:
        assert bpe(["a"], [], rule, bos_token_id=0, add_bos_token=False).encode("a") == [0]


def spell(data):
    """A tokenizer of single bytes, some of them spread over ids of their own."""
    return Tokenizer(split=lambda text, special: list(text.encode()), pieces=tuple(bytes([i]) for i in range(256)),
                     special=frozenset({0}))  # fmt: skip


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 5), max_size=20))
def test_streamed_chunks_join_to_the_decoded_text(ids, sizes):
    """Also for bytes that are no UTF-8; and valid text never shows a replacement character on the way."""
    tokenizer = spell(None)
    decoder, at, chunks = tokenizer.stream(), 0, []
    for size in [*sizes, len(ids)]:
        chunks.append(decoder.push(ids[at : at + size]))
        at += size
    chunks.append(decoder.flush())
    assert "".join(chunks) == tokenizer.decode(ids) == bytes(i for i in ids if i).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_no_character_is_split(text):
    tokenizer = spell(None)
    decoder = tokenizer.stream(skip_special=False)
    chunks = [decoder.push([i]) for i in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(chunks).replace("\ufffd", "", text.count("\ufffd"))
    assert "".join(chunks) + decoder.flush() == text


def test_an_id_outside_the_vocabulary_and_a_lone_surrogate():
    with pytest.raises(UserError, match="token id 256 is outside the vocabulary of 256"):
        spell(None).decode([256])
    with pytest.raises(UserError, match="surrogate"):
        spell(None).encode("\ud800")


def naive_merge(text, scores):
    symbols = list(text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joins:
            return symbols
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("ab▁", min_size=2, max_size=4), st.integers(-3, 0), max_size=12),
    st.text("ab ", max_size=14),
)
def test_sentencepiece_merges_best_first_and_leftmost(scores, text):
    """Against the definition carried out naively, with many equal scores."""
    assert merge(text, scores) == naive_merge(text, scores)


def spm(**extra):
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "<0xC3>", "<0xA9>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0, 0, 0, -9, -9, -9, -1, -2, 0, 0, 0], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1, 1, 1, 6, 6, 4], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}, "test")


def test_sentencepiece_vocabulary():
    tokenizer = spm()
    assert tokenizer.encode("ab") == [1, 7]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("é") == [1, 3, 8, 9]  # as bytes
    assert tokenizer.encode("x") == [1, 3, 0]  # no bytes for it: unknown
    assert tokenizer.encode("ab<tool>ab", special=False) == [1, 7, 10, 7]
    assert tokenizer.encode("a</s>") == [1, 3, 4, 2]
    assert 2 not in tokenizer.encode("a</s>", special=False)
    assert spm(add_space_prefix=False, add_bos_token=False).encode("ab") == [6]


def test_the_space_in_front_is_taken_away_again_at_the_start_of_a_text_only():
    tokenizer = spm()
    ids = tokenizer.encode("ab ab")
    assert tokenizer.decode(ids) == "ab ab"
    assert tokenizer.decode(ids[2:], continuation=True) == " ab"
    decoder = tokenizer.stream()
    assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == "ab ab"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces isn't supported"),
        ({"precompiled_charsmap": [1]}, "precompiled_charsmap"),
        ({"tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab", "<0xC3>", "x", "<tool>"]}, "should be a byte"),
        ({"scores": None}, None),
    ],
)
def test_bad_sentencepiece_vocabularies(changes, words):
    if words is None:
        assert spm(**changes).encode("ab")[0] == 1
        return
    with pytest.raises(UserError, match=words):
        spm(**changes)


def test_stories_vocabulary_encodes_its_reference_text(make, stories, tmp_path):
    config, flat, vocabulary, reference = stories
    path = make.gguf(tmp_path / "s.gguf", config, flat, vocabulary=make.spm_metadata(vocabulary))
    tokenizer = tokenizer_from_gguf(open_gguf(path).metadata, str(path))
    ids = reference["greedy_ids"]
    text = tokenizer.decode([reference["bos"], *ids])
    assert reference["text"].startswith(text[: len(reference["text"])])
    assert tokenizer.encode(text) == [reference["bos"], *ids]


# --- tokenizer.json -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(make, tmp_path):
    make.tokenizer(tmp_path, 272)
    return tmp_path


def edit(path, change):
    values = json.loads(path.read_text("utf-8"))
    change(values)
    path.write_text(json.dumps(values), "utf-8")


def test_a_file_that_adds_begin_of_text(folder):
    path = folder / "tokenizer.json"
    encoder = tokenizers.Tokenizer.from_file(str(path))
    encoder.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    encoder.enable_truncation(3)
    path.write_text(encoder.to_str(), "utf-8")
    tokenizer = tokenizer_from_hf(folder, {})
    assert tokenizer.prefix == (1,)
    assert len(tokenizer.encode("abcdef")) == 7  # neither cut off nor ended
    edit(folder / "tokenizer_config.json", lambda v: v.update(add_bos_token=False))
    assert tokenizer_from_hf(folder, {}).prefix == ()


def test_sentencepiece_decoder(folder):
    path = folder / "tokenizer.json"
    vocab = {"<unk>": 0, "▁a": 1, "<0x0A>": 2, "b": 3, "▁": 4, "a": 5}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    encoder.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    d = tokenizers.decoders
    encoder.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    path.write_text(encoder.to_str(), "utf-8")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = tokenizer_from_hf(folder, {"eos_token_id": 3})
    assert tokenizer.encode("a a\n") == [1, 1, 2]
    assert tokenizer.decode([1, 1, 2]) == "a a\n" == encoder.decode([1, 1, 2])
    assert tokenizer.stop_ids[:1] == (2,)  # generation_config.json goes first


@pytest.mark.parametrize(("scheme", "text"), [("always", "a a"), ("never", " a a")])
def test_metaspace_decoder(folder, scheme, text):
    vocab = {"▁a": 0, "▁": 1, "a": 2}
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("▁", "a")]))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    encoder.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    (folder / "tokenizer.json").write_text(encoder.to_str(), "utf-8")
    tokenizer = tokenizer_from_hf(folder, {})
    assert tokenizer.encode(text) == [0, 0]
    assert tokenizer.decode([0, 0]) == text == encoder.decode([0, 0])


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "{}", "can't be used"),
        ("tokenizer.json", "[1]", "expected a JSON object"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", '{"chat_template": 1}', "expected a text"),
        ("tokenizer_config.json", '{"bos_token": 1}', "expected a text"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "expected true or false"),
        ("generation_config.json", '{"eos_token_id": "2"}', "expected an id or a list of ids"),
        ("generation_config.json", '{"eos_token_id": [true]}', "expected an id or a list of ids"),
    ],
)
def test_bad_tokenizer_files(folder, file, content, words):
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words) as error:
        tokenizer_from_hf(folder, {})
    assert file in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_decoder_and_named_templates(folder):
    edit(folder / "tokenizer_config.json", lambda v: v.update(chat_template=[{"name": "default", "template": "D"}]))
    assert tokenizer_from_hf(folder, {}).chat("x") == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert tokenizer_from_hf(folder, {}).chat("x") == "J"
    edit(folder / "tokenizer.json", lambda v: v.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}))
    with pytest.raises(UserError, match="WordPiece"):
        tokenizer_from_hf(folder, {})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer\.json is needed"):
        tokenizer_from_hf(folder, {})
