"""The 8-bit formats against ml_dtypes' own table of facts, and the saturating cast at every awkward value."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mtpjax.errors import UserError
from mtpjax.quant.formats import FORMATS, cast


def all_bf16() -> np.ndarray:
    """Every finite bfloat16 value, as float32."""
    values = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    return values[np.isfinite(values)]


def representable(name: str) -> np.ndarray:
    """Every finite value of a format, ascending, as float32."""
    values = np.arange(256, dtype=np.uint8).view(FORMATS[name].dtype).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


def ties(name: str) -> np.ndarray:
    """Every midpoint between neighbours of a format, and the float32 values just below and above each."""
    values = representable(name)
    middle = (values[:-1] + values[1:]) / 2
    return np.concatenate([middle, np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))])


def bits(x) -> np.ndarray:
    """The raw bits, so that -0 differs from 0 and NaN equals itself."""
    x = np.asarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


@pytest.mark.parametrize("name", FORMATS)
def test_facts_agree_with_ml_dtypes(name):
    fact, info = FORMATS[name], ml_dtypes.finfo(FORMATS[name].dtype)
    assert (fact.max, fact.min_normal, fact.min_subnormal) == (
        float(info.max),
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert (fact.mantissa_bits, fact.exponent_bits) == (info.nmant, info.nexp)


@pytest.mark.parametrize("name", FORMATS)
def test_cast_rounds_to_nearest_even_everywhere(name):
    grid = representable(name)
    x = np.concatenate([all_bf16(), ties(name), grid])
    x = np.clip(x, -FORMATS[name].max, FORMATS[name].max)
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    low, high = grid[above - 1].astype(np.float64), grid[above].astype(np.float64)
    down, up = x - low, high - x
    magnitude_code = np.abs(grid).astype(FORMATS[name].dtype).view(np.uint8)
    low_is_even = magnitude_code[above - 1] % 2 == 0
    nearest = np.where((down < up) | ((down == up) & low_is_even), low, high)
    assert (np.asarray(cast(x, name)).astype(np.float64) == nearest).all()


@pytest.mark.parametrize("name", FORMATS)
def test_numpy_eager_and_jit_agree_to_the_bit(name):
    x = np.concatenate([all_bf16(), ties(name), np.float32([np.inf, -np.inf, 0.0, -0.0])])
    expected = cast(x, name)
    assert expected.dtype == FORMATS[name].dtype and isinstance(expected, np.ndarray)
    assert (bits(expected) == bits(cast(jnp.asarray(x), name))).all()
    assert (bits(expected) == bits(jax.jit(cast, static_argnums=1)(x, name))).all()


@pytest.mark.parametrize("name", FORMATS)
def test_cast_saturates_and_keeps_nan_and_the_sign_of_zero(name):
    top = FORMATS[name].max
    for convert in (lambda x: x, jnp.asarray):
        got = np.asarray(cast(convert(np.float32([1e30, -1e30, np.inf, -np.inf, 464.5 * top, np.nan, -0.0])), name))
        assert (got[:5].astype(np.float32) == np.float32([top, -top, top, -top, top])).all()
        assert np.isnan(got[5].astype(np.float32))
        assert bits(got)[6] == 0x80


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_inputs_widen_first(dtype):
    x = np.concatenate([representable("e4m3fn"), [1.0625, 1.1875, 0.0029296875, 60000.0]]).astype(dtype)
    expected = cast(x.astype(np.float32))
    assert (bits(cast(x)) == bits(expected)).all()
    assert (bits(jax.jit(cast)(x)) == bits(expected)).all()


def test_one_rounding_from_float32_where_a_stop_at_bf16_would_round_twice():
    just_above_the_tie = np.float32(1.0625 + 2**-12)
    assert float(cast(just_above_the_tie[None])[0]) == 1.125
    assert float(just_above_the_tie.astype(ml_dtypes.bfloat16).astype(ml_dtypes.float8_e4m3fn)) == 1.0


def test_the_cast_stands_behind_a_barrier():
    """XLA on GPU folds float32 -> float8 -> float32 otherwise."""
    text = jax.jit(lambda x: cast(x).astype(jnp.float32)).lower(jnp.ones(4)).as_text()
    assert "optimization_barrier" in text


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(UserError, match="'e3m4'.*e4m3fn, e5m2"):
        cast(np.ones(1, np.float32), "e3m4")
