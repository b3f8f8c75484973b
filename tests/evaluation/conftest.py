"""A tiny model in a Hugging Face folder, for whatever needs a file and not a good model."""

import pytest

from tests.io.conftest import flat_random, tiny_config, write_hf


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    config = tiny_config(max_context=256, n_layers=1)
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, flat_random(config))
