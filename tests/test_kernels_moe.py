"""The CPU device's products and experts: against float32 numpy, and the same bits on every path."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.errors import UnsupportedError
from dali_gguf.kernels.cpu import CpuDevice
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor
from tests.kernel_helpers import random_weights
from tests.numpy_device import NumpyDevice

E, A, D, F = 8, 2, 256, 512


@pytest.fixture(scope="module")
def device():
    device = CpuDevice(2)
    yield device
    device.close()


def stack(rng, ggml_type, *shape) -> Tensor:
    data = random_weights(ggml_type, int(np.prod(shape[:-1])), shape[-1], rng)
    return Tensor(f"{ggml_type.name}{shape}", ggml_type, shape, data.reshape(-1))


def small(tensor: Tensor) -> Tensor:
    """float tensors scaled down, so that activations stay moderate."""
    data = (tensor.data.view(np.float32) / 16).view(np.uint8)
    return Tensor(tensor.name, tensor.type, tensor.shape, data)


def layer(rng, ggml_type=Q.F32, down_type=None, **more) -> LayerExperts:
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    types = (ggml_type, ggml_type, down_type or ggml_type)
    tensors = [stack(rng, t, *s) for t, s in zip(types, shapes)]
    tensors = [small(t) if t.type == Q.F32 else t for t in tensors]
    return LayerExperts(0, *(tuple(t.expert(e) for e in range(E)) for t in tensors), **more)


def routing(rng, tokens: int, experts=None) -> Routing:
    experts = np.arange(E) if experts is None else np.asarray(experts)
    ids = np.array([rng.choice(experts, A, replace=False) for _ in range(tokens)], np.int32)
    weights = rng.random((tokens, A)).astype(np.float32)
    return Routing(ids, weights, np.bincount(ids.ravel(), minlength=E))


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_experts_like_numpy(device, tokens):
    rng = np.random.default_rng(tokens)
    experts, chosen = layer(rng), routing(rng, tokens)
    x = rng.standard_normal((tokens, D)).astype(np.float32)
    expected = NumpyDevice().moe(x, chosen, experts)
    y, most = device.moe(x, chosen, experts), np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=2e-6 * most)


def test_all_tokens_to_the_same_experts(device):
    """Two experts take every token, in more groups than one call of a product; six take none."""
    rng = np.random.default_rng(5)
    experts, chosen = layer(rng), routing(rng, 600, [3, 6])
    x = rng.standard_normal((600, D)).astype(np.float32)
    expected = NumpyDevice().moe(x, chosen, experts)
    y, most = device.moe(x, chosen, experts), np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=2e-6 * most)


def test_biases_and_clamped_activation(device):
    rng = np.random.default_rng(6)
    biases = dict(gate_bias=rng.standard_normal((E, F)).astype(np.float32) * 8,
                  up_bias=rng.standard_normal((E, F)).astype(np.float32) * 8,
                  down_bias=rng.standard_normal((E, D)).astype(np.float32))
    experts, chosen = layer(rng, activation="swiglu_oai", **biases), routing(rng, 5)
    x = rng.standard_normal((5, D)).astype(np.float32)
    expected = NumpyDevice().moe(x, chosen, experts)
    y, most = device.moe(x, chosen, experts), np.abs(expected).max()
    np.testing.assert_allclose(y, expected, atol=3e-6 * most)


def test_quantized_experts_near_numpy(device):
    """Activations are rounded to int8 on the way: about a hundredth of the largest value."""
    rng = np.random.default_rng(7)
    experts, chosen = layer(rng, Q.Q8_0, Q.Q4_K), routing(rng, 9)
    x = rng.standard_normal((9, D)).astype(np.float32)
    expected = NumpyDevice().moe(x, chosen, experts)
    y = device.moe(x, chosen, experts)
    assert np.sqrt(np.mean((y - expected) ** 2)) < 0.02 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("tokens", [1, 6])
def test_parts_in_any_order_are_the_same_bits(device, tokens):
    rng = np.random.default_rng(8)
    experts, chosen = layer(rng, Q.Q8_0, Q.Q4_K), routing(rng, tokens)
    x = rng.standard_normal((tokens, D)).astype(np.float32)
    whole = device.moe(x, chosen, experts)
    active = np.flatnonzero(chosen.workload)
    copies = [[np.concatenate([m.data]).copy() for m in experts.matrices(e)] for e in range(E)]
    elsewhere = np.array([[c[role].ctypes.data for c in copies] for role in range(3)], np.int64)
    step = device.moe_begin(x, chosen, experts)
    for e in active[::-1]:
        device.moe_run(step, [e], elsewhere)
    assert (device.moe_end(step) == whole).all()


def test_experts_not_run_count_as_nothing(device):
    rng = np.random.default_rng(9)
    experts, chosen = layer(rng), routing(rng, 4)
    x = rng.standard_normal((4, D)).astype(np.float32)
    active = np.flatnonzero(chosen.workload)
    parts = []
    for some in (active[:2], active[2:]):
        step = device.moe_begin(x, chosen, experts)
        device.moe_run(step, some)
        parts.append(device.moe_end(step).copy())
    whole = device.moe(x, chosen, experts)
    np.testing.assert_allclose(parts[0] + parts[1], whole, atol=1e-5 * np.abs(whole).max())


@pytest.mark.parametrize("ggml_type", [Q.Q8_0, Q.Q4_K], ids=lambda t: t.name)
def test_same_bits_for_any_threads_and_any_split_of_tokens(ggml_type):
    rng = np.random.default_rng(10)
    experts, chosen = layer(rng, ggml_type), routing(rng, 12)
    matrices = [stack(rng, ggml_type, rows, D) for rows in (64, 100, 17)]
    x = rng.standard_normal((12, D)).astype(np.float32)
    results = []
    for threads in (1, 2, 3, 8):
        device = CpuDevice(threads)
        weights = [device.weight(m) for m in matrices]
        results.append((device.moe(x, chosen, experts).copy(), *device.matmul(x, *weights)))
        for first in (0, 1, 3, 11):
            rows = slice(first, first + 1)
            one = Routing(chosen.expert_ids[rows], chosen.weights[rows],
                          np.bincount(chosen.expert_ids[first], minlength=E))
            assert (device.moe(x[rows], one, experts) == results[0][0][rows]).all()
            for y, expected in zip(device.matmul(x[rows], *weights), results[0][1:]):
                assert (y == expected[rows]).all()
        device.close()
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other))


def test_matmul_of_several_kinds_keeps_the_order(device):
    rng = np.random.default_rng(11)
    matrices = [stack(rng, t, 33, D) for t in (Q.Q4_K, Q.F32, Q.Q8_0, Q.Q4_K)]
    x = rng.standard_normal((3, D)).astype(np.float32)
    together = device.matmul(x, *(device.weight(m) for m in matrices))
    for m, y in zip(matrices, together):
        assert (device.matmul(x, device.weight(m))[0] == y).all()


def test_embedding_rows(device):
    table = stack(np.random.default_rng(12), Q.Q8_0, 50, D)
    ids = np.array([3, 0, 49, 3], np.int32)
    rows = device.embed(ids, device.weight(table))
    np.testing.assert_allclose(rows, NumpyDevice().embed(ids, table), rtol=2e-6)


def test_experts_of_different_types_are_refused(device):
    rng = np.random.default_rng(13)
    experts = layer(rng)
    gate = (*experts.gate[:-1], stack(rng, Q.Q8_0, F, D))
    mixed = LayerExperts(0, gate, experts.up, experts.down)
    with pytest.raises(UnsupportedError, match="experts of a layer must be alike"):
        device.moe(np.ones((1, D), np.float32), routing(rng, 1), mixed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_shapes(seed):
    """Rows, columns, tokens and loads at random, in every type, against the reference."""
    rng = np.random.default_rng(seed)
    ggml_type = rng.choice([Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_1, Q.MXFP4, Q.Q2_K, Q.Q3_K,
                            Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS])
    rows, cols = int(rng.integers(1, 400)), 256 * int(rng.integers(1, 24))
    tokens = int(rng.integers(1, 600))
    tensor = stack(rng, Q(ggml_type), rows, cols)
    x = rng.standard_normal((tokens, cols)).astype(np.float32)
    device = CpuDevice(int(rng.integers(1, 4)))
    (y,) = device.matmul(x, device.weight(tensor))
    (expected,) = NumpyDevice().matmul(x, tensor)
    device.close()
    assert np.sqrt(np.mean((y - expected) ** 2)) < 0.02 * np.sqrt(np.mean(expected**2))
