"""The key/value cache: sizes, formats of its rows, memory touched only where used."""

import sys

import gguf
import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.kernels.kv import KINDS, KVCache, cache_bytes, row_bytes
from dali_gguf.kernels.kv_rows import store_row
from dali_gguf.kernels.simd import address_of, jit


@jit
def _store(kind, x, out):
    store_row(kind, address_of(x), x.size, address_of(out))


def stored(x, kv_type):
    out = np.zeros(row_bytes(x.size, kv_type), np.uint8)
    _store(KINDS[kv_type], x, out)
    return out


def test_rows_are_stored_as_gguf_does():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * np.exp(rng.uniform(-12, 12, 4096))).astype(np.float32)
    x[:64], x[64:96] = 0, -1.5
    assert stored(x, "f32").tobytes() == x.tobytes()
    with np.errstate(over="ignore"):
        assert stored(x, "f16").tobytes() == x.astype(np.float16).tobytes()
        assert stored(x[:13], "f16").tobytes() == x[:13].astype(np.float16).tobytes()
    expected = gguf.quants.quantize(x.reshape(1, -1), gguf.GGMLQuantizationType.Q8_0)
    assert stored(x, "q8_0").tobytes() == expected.tobytes()


def test_every_half_is_rounded_to_even():
    """All halves, and the two neighbours of each midpoint between them."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([halves, middles, np.nextafter(middles, np.float32(0)), -middles,
                        np.nextafter(middles, np.float32(np.inf)), [np.inf, -np.inf, 65519, 65520]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        assert stored(x, "f16").tobytes() == x.astype(np.float16).tobytes()
    assert np.isnan(stored(np.full(8, np.nan, np.float32), "f16").view(np.float16)).all()


def test_sizes():
    assert [row_bytes(128, t) for t in ("f32", "f16", "q8_0")] == [512, 256, 136]
    cache = KVCache.empty(3, 2, 100, 4, 64, 32, "f16")
    assert cache.keys.shape == (3, 2, 4, 100, 128) and cache.values.shape == (3, 2, 4, 100, 64)
    assert cache.bytes == cache_bytes(3, 2, 100, 4, 64, 32, "f16") == 3 * 2 * 4 * 100 * 192
    assert cache.bytes_per_position == 3 * 4 * 192
    assert (cache.n_layer, cache.n_seq, cache.n_ctx) == (3, 2, 100)
    compressed = KVCache.empty(3, 2, 100, 1, 576, 0, "f16")
    assert compressed.bytes == cache_bytes(3, 2, 100, 1, 576, 0, "f16") == 3 * 2 * 100 * 1152


def test_wrong_types():
    with pytest.raises(InputError, match="'q3'.*f32, f16, q8_0"):
        row_bytes(128, "q3")
    with pytest.raises(InputError, match="multiple of 32.*80.*--kv-type f16"):
        KVCache.empty(1, 1, 8, 1, 80, 80, "q8_0")


def test_copy_sequence():
    cache = KVCache.empty(2, 3, 10, 2, 8, 8, "f16")
    cache.keys[:, 0], cache.values[:, 0] = 7, 9
    cache.copy_sequence(0, 2, 4)
    assert (cache.keys[:, 2, :, :4] == 7).all() and not cache.keys[:, 2, :, 4:].any()
    assert (cache.values[:, 2, :, :4] == 9).all() and not cache.keys[:, 1].any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unused_positions_take_no_memory():
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    before = resident()
    cache = KVCache.empty(48, 1, 65536, 4, 128, 128, "f16")
    cache.keys[:, 0, :, :16] = 1
    assert cache.bytes == 6 << 30 and resident() - before < 64 << 20
