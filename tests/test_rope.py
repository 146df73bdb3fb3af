"""Frequencies: plain, linear, YaRN, Llama 3 factors."""

import math

import numpy as np
import pytest

from dali_gguf.config import RopeConfig
from dali_gguf.rope import attention_scale, rope_params, yarn_kept


def test_plain():
    p = rope_params(RopeConfig(4, base=100.0), interleaved=True)
    assert p.inv_freq.tolist() == pytest.approx([1, 0.1]) and p.magnitude == 1 and p.interleaved


def test_linear_and_factors():
    config = RopeConfig(4, base=100.0, scaling="linear", factor=4.0)
    assert rope_params(config, False, np.array([1, 2])).inv_freq.tolist() == pytest.approx(
        [0.25, 0.0125]
    )


def test_yarn_keeps_fast_and_divides_slow_frequencies():
    config = RopeConfig(64, base=10000.0, scaling="yarn", factor=8.0, n_ctx_original=512)
    kept = yarn_kept(config)
    assert kept[0] == 1 and kept[-1] == 0 and (np.diff(kept) <= 0).all()
    p, plain = rope_params(config, False), rope_params(RopeConfig(64), False)
    assert p.inv_freq[0] == plain.inv_freq[0] and p.inv_freq[-1] == pytest.approx(
        plain.inv_freq[-1] / 8
    )
    assert p.magnitude == pytest.approx(0.1 * math.log(8) + 1)


def test_yarn_range_ends_on_whole_dimensions():
    """By hand: 64 ln(512 / (32 * 2 pi)) / (2 ln 10000) = 3.25 -> 3; with 1 rotation 15.29 -> 16."""
    kept = yarn_kept(RopeConfig(64, base=10000.0, scaling="yarn", factor=8.0, n_ctx_original=512))
    assert np.flatnonzero(kept == 1).max() == 3 and np.flatnonzero(kept == 0).min() == 16


def test_deepseek_scales_the_logits_instead():
    config = RopeConfig(64, scaling="yarn", factor=40.0, n_ctx_original=4096, log_multiplier=0.0707)
    assert rope_params(config, True).magnitude == 1
    assert attention_scale(config, 192) == pytest.approx(
        (0.0707 * math.log(40) + 1) ** 2 / math.sqrt(192)
    )
    assert attention_scale(RopeConfig(64), 192) == pytest.approx(1 / math.sqrt(192))
