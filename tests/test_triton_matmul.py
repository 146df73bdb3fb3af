"""The Triton kernels through Triton's interpreter, against dequantized products in numpy."""

import os

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from dali_gguf.device import RopeParams  # noqa: E402
from dali_gguf.offload import triton_matmul as tm  # noqa: E402
from dali_gguf.offload.torch_device import TorchDevice  # noqa: E402
from dali_gguf.offload.triton_blocks import LAYOUTS  # noqa: E402
from dali_gguf.routing import LayerExperts, Routing  # noqa: E402
from tests.numpy_device import NumpyDevice, dequantize  # noqa: E402
from tests.quant_blocks import random_tensor  # noqa: E402

NEEDED = [Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.MXFP4]


def test_every_needed_type_has_a_kernel():
    assert set(NEEDED) <= set(LAYOUTS)
    assert not tm.supports(Q.Q4_K, 320) and not tm.supports(Q.Q2_K, 256)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch):
    """The interpreter takes its time for every program of a grid, hardly for their size."""
    monkeypatch.setattr(tm, "TILES", tm.Tiles(vector_rows=64, dot_rows=64))


@pytest.mark.parametrize("n_token", [1, 3, 35])
@pytest.mark.parametrize("kind", LAYOUTS, ids=lambda k: k.name)
def test_one_matrix(kind, n_token):
    """70 rows and, where the type has blocks of 32, 288 columns: the last tiles are not full."""
    cols = 512 if GGML_QUANT_SIZES[kind][0] == 256 else 288
    weight = random_tensor(kind, (70, cols), seed=int(kind))
    x = np.random.default_rng(1).normal(size=(n_token, cols)).astype(np.float32)
    matrices, data = tm.Matrices(kind, 70, cols), torch.from_numpy(weight.data.copy())
    ours = tm.matmul(torch.from_numpy(x), (data, matrices))[0].numpy()
    exact = x.astype(np.float64) @ dequantize(weight).astype(np.float64).T
    assert np.abs(ours - exact).max() < 2e-5 * np.abs(exact).max()


def experts_of(kinds, n_expert=5, n_embd=256, n_ff=256, activation="silu", bias=False):
    rng = np.random.default_rng(3)
    stacks = [
        tuple(random_tensor(k, shape, seed=10 * e + r, size=0.1) for e in range(n_expert))
        for r, (k, shape) in enumerate(zip(kinds, [(n_ff, n_embd)] * 2 + [(n_embd, n_ff)]))
    ]
    biases = [rng.normal(size=(n_expert, n)).astype(np.float32) for n in (n_ff, n_ff, n_embd)]
    return LayerExperts(0, *stacks, activation, *(biases if bias else [None] * 3))


def routing_of(n_token, n_expert, n_used, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((n_token, n_expert)))[:, :n_used].astype(np.int32)
    weights = rng.random((n_token, n_used)).astype(np.float32)
    return Routing(ids, weights, np.bincount(ids.ravel(), minlength=n_expert))


@pytest.mark.parametrize("n_token", [1, 13])
@pytest.mark.parametrize(
    "kinds,activation,bias",
    [((Q.Q4_K, Q.Q4_K, Q.Q6_K), "silu", False), ((Q.MXFP4,) * 3, "swiglu_oai", True)],
    ids=["q4_k_m", "gpt-oss"],
)
def test_the_experts_of_a_layer(kinds, activation, bias, n_token):
    experts = experts_of(kinds, activation=activation, bias=bias)
    routing = routing_of(n_token, 5, 2)
    x = np.random.default_rng(2).normal(size=(n_token, 256)).astype(np.float32)
    device = TorchDevice(torch.device("cpu"), fused=True)
    assert device.kernels is tm
    ours = device.moe(torch.from_numpy(x), routing, experts).numpy()
    exact = NumpyDevice().moe(x, routing, experts)
    assert np.abs(ours - exact).max() < 1e-4 * np.abs(exact).max()


def test_large_activations_do_not_overflow_half_precision():
    scaled, scale = tm.half_rows(torch.tensor([[1e6, -3.0, 0.0], [0.0, 0.0, 0.0]]))
    back = scaled.half().float() * scale[:, None]
    assert torch.allclose(back, torch.tensor([[1e6, -3.0, 0.0], [0.0, 0.0, 0.0]]), rtol=1e-2)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size,n_rot", [(16, 16), (24, 16), (24, 10)])
def test_rope(size, n_rot, interleaved, normed):
    """Heads whose size is no power of two, some turned in part."""
    rng = np.random.default_rng(0)
    inv_freq = (1 / 10000 ** (np.arange(n_rot // 2) * 2 / n_rot)).astype(np.float32)
    params = RopeParams(n_rot, interleaved, inv_freq, 1.2)
    x, weight = rng.normal(size=(5, 3, size)).astype(np.float32), rng.random(size, np.float32)
    positions = np.array([0, 1, 7, 900, 4000], np.int32)
    device = TorchDevice(torch.device("cpu"), fused=True)
    given = torch.from_numpy(x)
    norm = (torch.from_numpy(weight), 1e-6) if normed else None
    ours = device.rope(given, positions, params, norm)
    assert np.array_equal(given.numpy(), x), "the input stays as it is"
    exact = NumpyDevice().rope(x, positions, params, (weight, 1e-6) if normed else None)
    assert np.abs(ours.numpy() - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (3, 2, 24)])
def test_rms_norm(shape):
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=shape).astype(np.float32), rng.random(shape[-1], np.float32)
    device = TorchDevice(torch.device("cpu"), fused=True)
    ours = device.rms_norm(torch.from_numpy(x), torch.from_numpy(weight), 1e-6).numpy()
    exact = NumpyDevice().rms_norm(x, weight, 1e-6)
    assert ours.shape == shape and np.abs(ours - exact).max() < 1e-5 * np.abs(exact).max()
