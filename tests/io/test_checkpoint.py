"""Checkpoints: exact, atomic, checked, and clear about what is wrong."""

import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtpjax.errors import UserError
from mtpjax.io import checkpoint as ck


def tree(value=1.0):
    return {
        "params": {"layers_0": {"weight": jnp.full((3, 5), value) / 3}, "scale": jnp.arange(4, dtype=jnp.bfloat16)},
        "q": jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
        "step": jnp.int32(7),
        "key": jax.random.key(3),
    }


def latest(folder) -> ck.Checkpoint:
    found = ck.latest_checkpoint(folder)
    assert found is not None
    return found


def bits(leaf):
    leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return np.asarray(leaf).tobytes()


def same(a, b):
    return all(x.dtype == y.dtype and bits(x) == bits(y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.fixture
def folder(tmp_path):
    """Three saved steps, of which two stay."""
    for step in (1, 2, 3):
        ck.save_checkpoint(tmp_path, step, tree(step), {"data": {"next_index": step}, "pair": (1, 2)})
    return tmp_path


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_what_is_saved_comes_back_to_the_bit(folder):
    found = latest(folder)
    assert found.step == 3
    assert found.info == {"data": {"next_index": 3}, "pair": [1, 2]}
    back = ck.restore_checkpoint(found, jax.tree.map(jnp.zeros_like, tree() | {"key": 0}) | {"key": jax.random.key(9)})
    assert same(back, tree(3))
    assert jax.tree.structure(back) == jax.tree.structure(tree())


def test_only_the_newest_stay(folder):
    assert ck.checkpoint_steps(folder) == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["00000002", "00000003"]


def test_none_is_found_where_none_is(tmp_path):
    assert ck.latest_checkpoint(tmp_path) is None
    assert ck.latest_checkpoint(tmp_path / "absent") is None


def test_a_step_is_saved_once(folder):
    with pytest.raises(ValueError, match="already"):
        ck.save_checkpoint(folder, 3, tree(), {})


@pytest.mark.parametrize("moment", ["_hash_files", "_sync"])
def test_a_save_that_dies_leaves_the_one_before(folder, monkeypatch, moment):
    def die(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ck, moment, die)
        with pytest.raises(KeyboardInterrupt):
            ck.save_checkpoint(folder, 4, tree(4), {})
    assert (folder / ".saving-4").exists()
    assert latest(folder).step == 3
    ck.save_checkpoint(folder, 4, tree(4), {})
    assert sorted(path.name for path in folder.iterdir()) == ["00000003", "00000004"]


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damage_to_any_file_is_seen_and_the_one_before_is_taken(folder, harm):
    count = len(files_of(folder / "00000003"))
    assert count > 5
    for number in range(count):
        ck.save_checkpoint(folder, 10, tree(10), {})
        victim = files_of(folder / "00000010")[number]
        content = bytearray(victim.read_bytes())
        if harm == "flip" and content:
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        elif harm == "cut" and content:
            victim.write_bytes(content[: len(content) // 2])
        else:
            victim.unlink()
        with pytest.warns(UserWarning, match="00000010 is damaged"):
            assert latest(folder).step == 3
    assert same(ck.restore_checkpoint(latest(folder), tree()), tree(3))
    assert len(list(folder.glob("damaged-00000010*"))) == count


def test_nothing_but_damage_is_an_error(folder):
    for step in (2, 3):
        (folder / f"{step:08d}" / ck.MANIFEST).write_text("{}")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(UserError, match="every checkpoint is damaged"):
                ck.latest_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": jnp.zeros(256, jnp.float32)}, r"\['q'\] is float8_e4m3fn\[256\] in it, expected float32\[256\]"),
        ({"step": jnp.zeros(2, jnp.int32)}, r"\['step'\] is int32\[\] in it, expected int32\[2\]"),
        ({"more": jnp.zeros(2)}, r"\['more'\] is absent in it, expected float32\[2\]"),
        ({"params": {}}, r"\['params'\].* is float32\[3, 5\] in it, expected absent"),
    ],
)
def test_another_structure_is_refused(folder, change, said):
    with pytest.raises(UserError, match=said):
        ck.restore_checkpoint(latest(folder), tree() | change)


def test_the_manifest_can_be_read_by_anyone(folder):
    manifest = json.loads((folder / "00000003" / ck.MANIFEST).read_text())
    assert manifest["leaves"]["['params']['layers_0']['weight']"] == ["float32", [3, 5]]


def test_saving_and_loading_is_quiet(tmp_path):
    """Orbax speaks at import, at a load without shardings, and at exit; a user should hear nothing."""
    program = (
        "import sys, pathlib, jax.numpy as jnp; from mtpjax.io import checkpoint as c; f = pathlib.Path(sys.argv[1]);"
        "t = {'a': jnp.ones(3), 's': jnp.int32(1)}; c.save_checkpoint(f, 1, t, {});"
        "print(c.restore_checkpoint(c.latest_checkpoint(f), t)['a'].sum())"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "3.0\n", "")
