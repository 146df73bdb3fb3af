"""The closing line."""

import numpy as np

from dali_gguf.stats import Stats, hash_logits


def test_rates_and_line():
    stats = Stats(bytes_per_token=2_000_000_000).prefilled(10, 0.5).decoded(3, 0.1).decoded(1, 0.1)
    stats = stats.finished("eos").hashed(0xABC)
    assert (stats.prefill_rate, stats.decode_rate) == (20, 20) and round(stats.read_rate, 6) == 40
    assert stats.line() == (
        "prefill 10 tokens, 20.0 tokens/s | decode 4 tokens, 20.0 tokens/s, 40.0 GB/s | "
        "logits 00000abc | stopped by eos"
    )


def test_nothing_measured_yet():
    assert Stats().decode_rate == Stats().prefill_rate == 0


def test_hash_depends_on_values_and_order():
    a, b = np.arange(64, dtype=np.float32), np.arange(64, dtype=np.float32) + 1
    assert hash_logits(a, 0) == hash_logits(a.copy(), 0) != hash_logits(b, 0)
    assert hash_logits(b, hash_logits(a, 0)) != hash_logits(a, hash_logits(b, 0))
