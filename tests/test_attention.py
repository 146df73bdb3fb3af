"""Attention: against float64 numpy, and the same bits however a step is cut."""

import numpy as np
import pytest

from dali_gguf.device import Step
from dali_gguf.errors import InputError
from dali_gguf.kernels.attention import attention
from dali_gguf.kernels.kv import KVCache
from dali_gguf.kernels.pool import Pool

TOLERANCE = {"f32": 2e-6, "f16": 2e-3, "q8_0": 2e-2}


@pytest.fixture(scope="module")
def pools():
    made = {n: Pool(n) for n in (1, 2, 3, 5)}
    yield made
    for pool in made.values():
        pool.close()


def tokens(first, n, sequence=0):
    positions = np.arange(first, first + n, dtype=np.int32)
    return Step(np.zeros(n, np.int32), positions, np.full(n, sequence, np.int32))


def case(rng, n, heads, groups, k_size, v_size):
    shapes = (n, heads, k_size), (n, groups, k_size), (n, groups, v_size)
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def reference(q, k, v, scale, window=0, sinks=None):
    """float64 [T, H, V] of a whole sequence."""
    n, heads, _ = q.shape
    k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thk,uhk->htu", q.astype(np.float64), k) * scale
    ago = np.arange(n)[:, None] - np.arange(n)
    scores[:, (ago < 0) | ((ago >= window) if window else False)] = -np.inf
    if sinks is not None:
        extra = np.broadcast_to(sinks.astype(np.float64)[:, None, None], (heads, n, 1))
        scores = np.concatenate([scores, extra], axis=2)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("htu,uhv->thv", p[:, :, :n], v)


def run(pool, q, k, v, kv_type="f32", chunks=None, n_ctx=None, v_size=0, **options):
    """The whole sequence, in chunks of the given sizes, through a fresh cache."""
    n = len(q)
    cache = KVCache.empty(2, 1, n_ctx or n, k.shape[1], k.shape[2], 0 if v is None else v.shape[2],
                          kv_type)
    scale, out, at = q.shape[2] ** -0.5, [], 0
    for size in chunks or [n]:
        part = slice(at, at + size)
        out.append(attention(pool, q[part], k[part], None if v is None else v[part], cache, 1,
                             tokens(at, size), scale, v_size=v_size, **options))
        at += size
    assert at == n and not cache.keys[0].any()
    return np.concatenate(out)


def random_chunks(rng, n):
    sizes = []
    while sum(sizes) < n:
        sizes.append(int(min(rng.choice([1, 2, 3, 17, 64, 100, 300]), n - sum(sizes))))
    return sizes


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(pools, seed):
    rng = np.random.default_rng(seed)
    n = int(rng.choice([1, 2, 7, 63, 64, 65, 130, 257, 600]))
    groups = int(rng.choice([1, 2, 4]))
    heads = groups * int(rng.choice([1, 2, 3, 5, 8, 9, 16]))
    k_size, v_size = (int(rng.choice([32, 64, 96, 128])) for _ in range(2))
    kv_type = ("f32", "f16", "q8_0")[seed % 3]
    window = int(rng.choice([0, 1, 5, 64, 100]))
    sinks = rng.standard_normal(heads).astype(np.float32) * 3 if seed % 2 else None
    q, k, v = case(rng, n, heads, groups, k_size, v_size)
    out = run(pools[2], q, k, v, kv_type, window=window, sinks=sinks)
    expected = reference(q, k, v, k_size**-0.5, window, sinks)
    assert out.shape == (n, heads, v_size)
    np.testing.assert_allclose(out, expected, atol=TOLERANCE[kv_type] * np.abs(expected).max())
    chunks = random_chunks(rng, n)
    for threads in (1, 3, 5):
        again = run(pools[threads], q, k, v, kv_type, chunks, n + 40, window=window, sinks=sinks)
        assert again.tobytes() == out.tobytes(), (threads, chunks)


def test_odd_sizes(pools):
    rng = np.random.default_rng(50)
    for k_size, v_size, kv_type in ((5, 3, "f32"), (20, 44, "f16"), (80, 80, "f16"), (1, 1, "f16")):
        q, k, v = case(rng, 90, 6, 2, k_size, v_size)
        expected = reference(q, k, v, k_size**-0.5)
        np.testing.assert_allclose(run(pools[2], q, k, v, kv_type), expected,
                                   atol=TOLERANCE[kv_type] * np.abs(expected).max())


def test_values_in_the_keys(pools):
    """MLA: one wide key whose front is the value, many heads."""
    rng = np.random.default_rng(51)
    q, k, _ = case(rng, 150, 16, 1, 576, 1)
    expected = reference(q, k, k[:, :, :512], 576**-0.5)
    for kv_type in ("f32", "f16", "q8_0"):
        out = run(pools[2], q, k, None, kv_type, v_size=512)
        np.testing.assert_allclose(out, expected, atol=TOLERANCE[kv_type] * np.abs(expected).max())
        again = run(pools[5], q, k, None, kv_type, [100, 1, 49], v_size=512)
        assert again.tobytes() == out.tobytes()


def test_long_context_split_over_keys(pools):
    rng = np.random.default_rng(52)
    n = 2100
    q, k, v = case(rng, n, 8, 1, 64, 64)
    expected = reference(q[:, :1], k, v, 0.125)
    whole = run(pools[1], q, k, v)
    np.testing.assert_allclose(whole[:, :1], expected, atol=2e-6 * np.abs(expected).max())
    for threads in (2, 3, 5):
        last = run(pools[threads], q, k, v, chunks=[n - 3, 1, 1, 1])
        assert last.tobytes() == whole.tobytes()


def test_batched_decode_equals_single(pools):
    """One token of each of five sequences of different lengths, in one step."""
    rng = np.random.default_rng(53)
    lengths, scale = [1, 70, 3, 600, 64], 48**-0.5
    cache = KVCache.empty(1, 5, 640, 2, 48, 48, "f16")
    q, k, v = case(rng, 601, 6, 2, 48, 48)
    singles = []
    for s, n in enumerate(lengths):
        attention(pools[2], q[:n], k[:n], v[:n], cache, 0, tokens(0, n, s), scale)
    keys = cache.keys.copy()
    for s, n in enumerate(lengths):
        row, step = slice(n, n + 1), tokens(n, 1, s)
        singles.append(attention(pools[1], q[row], k[row], v[row], cache, 0, step, scale))
    cache.keys[:] = keys
    at = np.array(lengths, np.int32)
    step = Step(np.zeros(5, np.int32), at, np.arange(5, dtype=np.int32))
    together = attention(pools[3], q[at], k[at], v[at], cache, 0, step, scale)
    assert together.tobytes() == np.concatenate(singles).tobytes()


def test_several_prompts_in_one_step(pools):
    rng = np.random.default_rng(54)
    q, k, v = case(rng, 100, 4, 4, 32, 32)
    cache = KVCache.empty(1, 2, 128, 4, 32, 32, "f32")
    positions = np.concatenate([np.arange(30), np.arange(70)]).astype(np.int32)
    step = Step(np.zeros(100, np.int32), positions, np.repeat([1, 0], [30, 70]).astype(np.int32))
    out = attention(pools[2], q, k, v, cache, 0, step, 0.2)
    for part in (slice(0, 30), slice(30, 100)):
        expected = reference(q[part], k[part], v[part], 0.2)
        np.testing.assert_allclose(out[part], expected, atol=1e-5)


def test_extreme_scores_are_safe(pools):
    """Scores of +-1e5, and keys of a former, broken sequence behind the position."""
    rng = np.random.default_rng(55)
    q, k, v = case(rng, 80, 2, 1, 32, 32)
    q *= 1e4
    expected = reference(q, k, v, 32**-0.5)
    np.testing.assert_allclose(run(pools[2], q, k, v), expected, atol=5e-3)
    cache = KVCache.empty(1, 1, 128, 1, 32, 32, "f16")
    cache.keys[:], cache.values[:] = 255, 255  # NaN everywhere
    out = attention(pools[2], q, k, v, cache, 0, tokens(0, 80), 32**-0.5)
    assert np.isfinite(out).all()


def test_nan_is_not_hidden(pools):
    rng = np.random.default_rng(56)
    q, k, v = case(rng, 10, 2, 1, 32, 32)
    q[4, 1, 3] = np.nan
    out = run(pools[2], q, k, v)
    assert np.isnan(out[4, 1]).all() and np.isfinite(np.delete(out, 4, axis=0)).all()


def test_not_contiguous_inputs(pools):
    rng = np.random.default_rng(57)
    q, k, v = case(rng, 40, 4, 2, 64, 32)
    packed = np.concatenate([k, v], axis=2)
    out = run(pools[2], q, packed[:, :, :64], packed[:, :, 64:])
    assert out.tobytes() == run(pools[2], q, k, v).tobytes()


def test_outside_the_cache(pools):
    rng = np.random.default_rng(58)
    q, k, v = case(rng, 4, 2, 1, 32, 32)
    cache = KVCache.empty(1, 1, 16, 1, 32, 32, "f32")
    with pytest.raises(InputError, match="position 17.*context of 16"):
        attention(pools[2], q, k, v, cache, 0, tokens(14, 4), 1.0)
    with pytest.raises(InputError, match="sequence 1"):
        attention(pools[2], q, k, v, cache, 0, tokens(0, 4, 1), 1.0)
    zeros = np.zeros(4, np.int32)
    backwards = Step(zeros, np.arange(4, 0, -1).astype(np.int32), zeros)
    with pytest.raises(InputError, match="ascend"):
        attention(pools[2], q, k, v, cache, 0, backwards, 1.0)
    assert not cache.keys.any()
