"""RMS norm, rotary embedding, SwiGLU and the exponentials, against float64 numpy."""

import numpy as np
import pytest

from dali_gguf.device import RopeParams
from dali_gguf.errors import InputError
from dali_gguf.kernels.elementwise import RopeTables, rms_norm, swiglu
from dali_gguf.kernels.pool import Pool
from dali_gguf.kernels.simd import address_of, jit, load_f32x8, store
from dali_gguf.kernels.vmath import exp2_softmax, exp_f32x8


@pytest.fixture(scope="module")
def pools():
    made = {n: Pool(n) for n in (1, 3)}
    yield made
    for pool in made.values():
        pool.close()


@jit
def _exponentials(x, powers, exponentials):
    for i in range(0, x.size, 8):
        v = load_f32x8(address_of(x) + 4 * i)
        store(address_of(powers) + 4 * i, exp2_softmax(v))
        store(address_of(exponentials) + 4 * i, exp_f32x8(v))


def exponentials(x):
    out = np.empty((2, x.size), np.float32)
    _exponentials(x, out[0], out[1])
    return out


def test_exponentials():
    x = np.random.default_rng(0).uniform(-86.9, 0, 1 << 16).astype(np.float32)
    powers, _ = exponentials(x)
    exact = np.exp2(x.astype(np.float64))
    assert (np.abs(powers - exact) / np.spacing(exact.astype(np.float32))).max() < 2.1
    x = np.concatenate([x, -x])
    exact = np.exp(x.astype(np.float64))
    _, ours = exponentials(x)
    assert (np.abs(ours - exact) / np.spacing(exact.astype(np.float32))).max() < 1.2


def test_ends_of_the_exponentials():
    x = np.array([0, -np.inf, np.nan, -126, -125, -1, -2, -300], np.float32)
    np.testing.assert_array_equal(
        exponentials(x)[0], np.array([1, 0, np.nan, 0, 2.0**-125, 0.5, 0.25, 0], np.float32))
    x = np.array([0, -np.inf, np.nan, np.inf, -87, 88, 1000, -1000], np.float32)
    out = exponentials(x)[1]
    assert out[0] == 1 and np.isnan(out[2]) and (out[[1, 7]] == out[4]).all()
    assert (out[[3, 6]] == out[5]).all() and np.isfinite(out[5])


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 4, 64), (5, 2048), (70, 1001), (0, 8)])
def test_rms_norm(pools, shape):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape).astype(np.float32) * 3
    weight = rng.standard_normal(shape[-1]).astype(np.float32)
    out = rms_norm(pools[1], x, weight, 1e-5)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-6)
    assert rms_norm(pools[3], x, weight, 1e-5).tobytes() == out.tobytes()
    for t in range(shape[0]):  # the same bits alone as in a batch
        assert rms_norm(pools[1], x[t : t + 1], weight, 1e-5).tobytes() == out[t].tobytes()


@pytest.mark.parametrize("shape", [(1, 8), (3, 5), (1, 768), (100, 768)])
def test_swiglu(pools, shape):
    rng = np.random.default_rng(2)
    gate, up = (rng.standard_normal(shape).astype(np.float32) * 20 for _ in range(2))
    out = swiglu(pools[1], gate, up)
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=1e-6, atol=1e-7)
    assert swiglu(pools[3], gate, up).tobytes() == out.tobytes()


def test_swiglu_of_large_numbers(pools):
    gate = np.array([[-1e4, -200, -100, -88, 88, 100, 1e4, 1e30]], np.float32)
    out = swiglu(pools[1], gate, np.ones_like(gate))
    np.testing.assert_allclose(out, [[0, 0, 0, 0, 88, 100, 1e4, 1e30]], rtol=1e-6, atol=1e-30)


def rotated(x, positions, params):
    angles = positions[:, None] * params.inv_freq.astype(np.float64)
    cos, sin = (params.magnitude * f(angles)[:, None] for f in (np.cos, np.sin))
    n, half = params.n_rot, params.n_rot // 2
    first, second = ((slice(0, n, 2), slice(1, n, 2)) if params.interleaved
                     else (slice(0, half), slice(half, n)))
    out = x.astype(np.float64)
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot, size", [(128, 128), (64, 80), (20, 24), (2, 2)])
def test_rope(pools, interleaved, n_rot, size):
    rng = np.random.default_rng(3)
    inv_freq = (10000.0 ** -(np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
    params, tables = RopeParams(n_rot, interleaved, inv_freq, 1.1), RopeTables()
    for positions in ([0, 1, 2], [511, 512, 70000], [3]):
        positions = np.array(positions, np.int32)
        x = rng.standard_normal((len(positions), 3, size)).astype(np.float32)
        out = tables.rope(pools[1], x.copy(), positions, params)
        np.testing.assert_allclose(out, rotated(x, positions, params), atol=2e-6)


def test_rope_over_threads_and_in_place(pools):
    rng = np.random.default_rng(4)
    params = RopeParams(64, False, rng.uniform(0, 1, 32).astype(np.float32))
    x = rng.standard_normal((300, 4, 128)).astype(np.float32)
    positions, tables = np.arange(300, dtype=np.int32), RopeTables()
    one, view = x.copy(), np.concatenate([x, x], axis=2)[:, :, 128:]
    assert tables.rope(pools[1], one, positions, params) is one
    assert tables.rope(pools[3], x.copy(), positions, params).tobytes() == one.tobytes()
    assert tables.rope(pools[3], view, positions, params).tobytes() == one.tobytes()
    assert view.tobytes() == x.tobytes()


def test_negative_position(pools):
    params = RopeParams(2, False, np.ones(1, np.float32))
    x, positions = np.ones((1, 1, 2), np.float32), np.full(1, -1, np.int32)
    with pytest.raises(InputError, match="-1"):
        RopeTables().rope(pools[1], x, positions, params)
