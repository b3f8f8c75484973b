"""Text to batches: nothing lost, nothing seen twice in an epoch, the same order for the same seed."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtpjax.errors import UserError
from mtpjax.training.data import (
    SEPARATOR,
    DataConfig,
    batches,
    library_files,
    load_corpus,
    read_documents,
    to_batch,
    tokenize,
    windows,
)
from mtpjax.training.losses import IGNORE


def write(folder: Path, *texts: str) -> tuple[str, ...]:
    paths = [folder / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return tuple(map(str, paths))


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.integers(1, 9))
def test_every_token_but_the_first_is_predicted_once(documents, length):
    tokens = tokenize(documents)
    assert tokens.tolist() == [t for text in documents for t in (SEPARATOR, *text)]
    rows = windows(tokens, length)
    count = (len(tokens) - 1) // length
    assert rows.shape == (count, length + 1)
    assert rows[:, 1:].ravel().tolist() == tokens[1 : 1 + count * length].tolist()
    batch = to_batch(rows)
    assert (batch["ids"] == rows[:, :-1]).all()
    crossing = rows[:, 1:] == SEPARATOR
    assert (batch["labels"][crossing] == IGNORE).all()
    assert (batch["labels"] == rows[:, 1:])[~crossing].all()


def test_the_order_is_the_seeds():
    def order(seed, count=6):
        train = np.arange(40).reshape(20, 2)
        return [batch["ids"].ravel().tolist() for batch in itertools.islice(batches(train, 4, seed), count)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    epoch = list(itertools.chain(*order(1, 5)))
    assert sorted(epoch) == list(range(0, 40, 2)), "one epoch sees every window once"
    assert list(itertools.chain(*order(1, 10)[5:])) != epoch, "the next has another order"


@pytest.mark.parametrize("position", [0, 1, 4, 5, 13])
def test_a_position_resumes_exactly(position):
    train = np.arange(46).reshape(23, 2)
    whole = batches(train, 4, 3)
    for _ in range(position):
        next(whole)
    state = whole.get_state()
    again = batches(train, 4, 3)
    next(again)
    again.set_state(state)
    for _ in range(9):
        np.testing.assert_equal(next(whole), next(again))


def test_without_files_it_is_pythons_own_library():
    corpus = load_corpus(DataConfig(max_bytes=100_000))
    assert corpus.bytes == 100_000
    assert corpus.files > 1
    assert library_files() == sorted(library_files())
    assert corpus.sha256 == load_corpus(DataConfig(max_bytes=100_000)).sha256
    text = bytes(corpus.train[:, 1:].ravel().astype(np.uint8))
    assert b"import " in text
    assert len(corpus.validation) == (100_000 + corpus.files) * 0.05 // 128


def test_the_text_is_cut_off(tmp_path):
    files = write(tmp_path, "abc", "", "defg", "hij")
    assert read_documents(files, 5) == [b"abc", b"de"]
    assert read_documents(files, 100) == [b"abc", b"defg", b"hij"]


def test_validation_is_apart_from_training(tmp_path):
    files = write(tmp_path, "".join(map(chr, range(32, 127))) * 3)
    corpus = load_corpus(DataConfig(text_files=files, sequence_length=8, batch_size=2, validation_fraction=0.25))
    stream = tokenize([Path(files[0]).read_bytes()])
    cut = len(stream) - len(stream) // 4
    assert corpus.train.max() <= 256
    assert (corpus.train == windows(stream[:cut], 8)).all()
    assert (corpus.validation == windows(stream[cut:], 8)).all()


def test_bad_text_is_one_clear_line(tmp_path):
    short, empty = write(tmp_path, "too short for a batch", "")
    for files, said in (
        ([str(tmp_path / "absent.txt")], r"cannot read .*absent.txt \(No such file or directory\)"),
        ([str(tmp_path)], r"cannot read .*\(Is a directory\)"),
        (["a\0b"], "cannot read"),
        ([empty], r"no text in .*1\.txt"),
        ([short], r"has 22 tokens: .* a batch needs 16 .*lower data\.batch_size"),
    ):
        with pytest.raises(UserError, match=said) as caught:
            load_corpus(DataConfig(text_files=tuple(files)))
        assert "\n" not in str(caught.value)
