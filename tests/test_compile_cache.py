"""Compiled programs kept between starts: where, and when not."""

import jax
import pytest

from mtpjax.compile_cache import keep_compiled, processor_tag


@pytest.fixture(autouse=True)
def jax_as_it_was():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_is_for_processors_like_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = keep_compiled()
    assert folder == tmp_path / ".cache" / "mtpjax" / "jax" / processor_tag()
    assert jax.config.jax_compilation_cache_dir == str(folder)


def test_a_folder_that_jax_was_given_stays(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert keep_compiled(tmp_path / "other") is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert keep_compiled(tmp_path / "file") is None
    assert jax.config.jax_compilation_cache_dir is None
