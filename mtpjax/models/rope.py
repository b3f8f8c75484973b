"""Rotary position embedding (RoFormer, 2104.09864) with the long-context scalings in use.

Position p turns the pair (x_j, x_{j + H/2}) by the angle p * f_j, f_j = theta^(-2j/H): the half-split order of Hugging
Face files. GGUF files of the Llama family store interleaved pairs; the loader reorders their rows once.

Scalings change the frequencies f_j, once, at trace time:
- linear (2306.15595): f_j / factor;
- llama3: wavelengths longer than original_context / low_freq_factor are divided by `factor`, those shorter than
  original_context / high_freq_factor kept, and the ones between interpolated;
- yarn (2309.00071): a ramp over the number of rotations between beta_fast and beta_slow, and cos and sin multiplied by
  the attention factor 0.1 ln(factor) + 1.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from mtpjax.models.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Angular frequencies, f32 [head_dim / 2], and the factor on cos and sin."""
    base = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.freq_divisors is not None:
        return (base / np.asarray(rope.freq_divisors)).astype(np.float32), 1.0
    scale = 1.0
    if rope.kind == "linear":
        base = base / rope.factor
    elif rope.kind == "llama3":
        base = _llama3(base, rope)
    elif rope.kind == "yarn":
        base = _yarn(base, rope, head_dim)
        scale = rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1.0
    return base.astype(np.float32), float(scale)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    context = rope.original_context or 8192
    turns = context * base / (2 * math.pi)  # rotations over the original context = context / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return base * (smooth + (1 - smooth) / rope.factor)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    context = rope.original_context or 4096

    def dimension(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return base * (1 - ramp) + base / rope.factor * ramp


def cos_sin(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cos and sin of every angle: int positions [B, W] -> two f32 [B, W, 1, H/2]."""
    freq, scale = frequencies(rope, head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * freq[None, None, None, :]
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x_BWNH: Array, cos: Array, sin: Array) -> Array:
    """Turn every pair (j, j + H/2) of x [B, W, N, H]; computed in f32, returned in the dtype of x."""
    a, b = jnp.split(x_BWNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BWNH.dtype)
