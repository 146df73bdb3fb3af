"""Rotary frequencies of a model, with every scaling already in them."""

import math

import numpy as np

from dali_gguf.config import RopeConfig
from dali_gguf.device import RopeParams


def rope_params(
    rope: RopeConfig, interleaved: bool, freq_factors: np.ndarray | None = None
) -> RopeParams:
    """interleaved: pairs (0,1),(2,3).. instead of (i, i + n_rot/2).

    freq_factors [n_rot/2] divide the frequencies (tensor rope_freqs: Llama 3's scaling).
    """
    inv_freq = rope.base ** (
        -np.arange(0, rope.n_rot, 2, dtype=np.float64) / rope.n_rot
    )  # [n_rot/2]
    if freq_factors is not None:
        inv_freq = inv_freq / freq_factors
    magnitude = 1.0
    if rope.scaling == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.scaling == "yarn":
        kept = yarn_kept(rope)
        inv_freq = inv_freq / rope.factor * (1 - kept) + inv_freq * kept
        magnitude = yarn_magnitude(rope)
    return RopeParams(
        rope.n_rot,
        interleaved,
        inv_freq.astype(np.float32),
        float(magnitude * rope.attention_factor),
    )


def yarn_kept(rope: RopeConfig) -> np.ndarray:
    """How much of each frequency stays unscaled, 1 for the fastest to 0 for the slowest.

    YaRN (arXiv 2309.00071), in llama.cpp's form: the range's ends are rounded down and up to whole
    dimensions. Transformers leaves them unrounded where a config says `truncate: false` (gpt-oss).
    """

    def dimension(rotations: float) -> float:
        """Where a frequency turns that often within the original context."""
        turns = rope.n_ctx_original / (rotations * 2 * math.pi)
        return rope.n_rot * math.log(turns) / (2 * math.log(rope.base))

    low = max(0, math.floor(dimension(rope.beta_fast)))
    high = min(rope.n_rot - 1, math.ceil(dimension(rope.beta_slow)))
    ramp = (np.arange(rope.n_rot // 2) - low) / max(0.001, high - low)
    return 1 - np.clip(ramp, 0, 1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


def yarn_magnitude(rope: RopeConfig) -> float:
    """Factor of sin and cos. DeepSeek scales the attention's logits instead (attention_scale)."""
    return 1.0 if rope.log_multiplier else yarn_mscale(rope.factor)


def attention_scale(rope: RopeConfig, k_size: int) -> float:
    """Factor of q.k: 1/sqrt(k_size), times DeepSeek's mscale_all_dim correction squared.

    The key holds 0.1 * mscale_all_dim.
    """
    scale = 1 / math.sqrt(k_size)
    if rope.scaling != "yarn" or not rope.log_multiplier:
        return scale
    return scale * yarn_mscale(rope.factor, rope.log_multiplier / 0.1) ** 2
