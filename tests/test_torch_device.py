"""Every operation of the torch device against the numpy oracle, float32 on the CPU."""

import sys

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

torch = pytest.importorskip("torch")

from dali_gguf.device import RopeParams, Step  # noqa: E402
from dali_gguf.errors import InputError, UnsupportedError  # noqa: E402
from dali_gguf.offload import torch_attention  # noqa: E402
from dali_gguf.offload.pair_table import TURNS, PairTable  # noqa: E402
from dali_gguf.offload.read_back import ReadBack  # noqa: E402
from dali_gguf.offload.torch_device import TorchDevice  # noqa: E402
from dali_gguf.router import RouterRule  # noqa: E402
from dali_gguf.routing import LayerExperts, Routing  # noqa: E402
from dali_gguf.tensor import Tensor  # noqa: E402
from tests.numpy_device import NumpyDevice  # noqa: E402
from tests.quant_blocks import random_tensor  # noqa: E402

NUMPY = NumpyDevice()


@pytest.fixture
def device():
    d = TorchDevice(torch.device("cpu"))
    yield d
    d.close()


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(ours, exact, tolerance=2e-6):
    ours = ours.numpy() if isinstance(ours, torch.Tensor) else ours
    assert ours.shape == exact.shape and ours.dtype == np.float32
    assert np.abs(ours - exact).max() <= tolerance * max(1, np.abs(exact).max())


@pytest.mark.parametrize("kind", [Q.F32, Q.BF16, Q.Q4_K, Q.Q5_1])
def test_products_and_embedding(device, kind):
    a, b = random_tensor(kind, (9, 512)), random_tensor(kind, (5, 512), seed=1)
    x, ids = normal(3, 512), np.array([8, 0, 8], np.int32)
    ours = device.matmul(torch.from_numpy(x), device.weight(a), device.weight(b))
    for y, exact in zip(ours, NUMPY.matmul(x, a, b)):
        close(y, exact)
    table = device.weight(a)
    close(device.embed(ids, table), NUMPY.embed(ids, a))
    assert table._data is None, "a table that is only looked up takes no device memory"


def test_per_head_product(device):
    w = random_tensor(Q.Q8_0, (4, 6, 64))
    x = normal(3, 4, 64)
    close(device.batched_matmul(torch.from_numpy(x), device.weight(w)), NUMPY.batched_matmul(x, w))


def test_elementwise(device):
    x, y = normal(3, 4, 16), normal(3, 4, 16, seed=1)
    w = normal(16, seed=2)
    tx, ty, tw = (torch.from_numpy(v) for v in (x, y, w))
    close(device.rms_norm(tx, tw, 1e-5), NUMPY.rms_norm(x, w, 1e-5))
    close(device.swiglu(tx, ty), NUMPY.swiglu(x, y))
    close(device.sigmoid(tx), NUMPY.sigmoid(x))
    close(device.concat(tx, ty[:, :1, :3]), NUMPY.concat(x, y[:, :1, :3]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [8, 16])
def test_rope(device, interleaved, n_rot):
    params = RopeParams(
        n_rot,
        interleaved,
        (1 / 10000 ** (np.arange(n_rot // 2) * 2 / n_rot)).astype(np.float32),
        1.2,
    )
    x, positions = normal(5, 3, 16), np.array([0, 1, 7, 900, 4000], np.int32)
    exact = NUMPY.rope(x, positions, params)
    close(device.rope(torch.from_numpy(x.copy()), positions, params), exact, 1e-5)
    later = positions + 3
    close(
        device.rope(torch.from_numpy(x.copy()), later, params), NUMPY.rope(x, later, params), 1e-5
    )


CASES = {
    "grouped": dict(groups=2, heads=6),
    "window": dict(window=5),
    "sinks": dict(sinks=True, window=4),
    "mla": dict(groups=1, heads=4, v=None, v_size=24),
    "q8_0": dict(kv_type="q8_0"),
    "f16": dict(kv_type="f16"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("score_bytes", [1 << 26, 600])
def test_attention(device, name, score_bytes, monkeypatch):
    """Prefill in two chunks, then batched decode of two sequences. Small score blocks: several."""
    monkeypatch.setattr(torch_attention, "SCORE_BYTES", score_bytes)
    case = CASES[name]
    heads, groups = case.get("heads", 4), case.get("groups", 4)
    v_size = 0 if "v_size" in case else 32
    shape = (1, 2, 32, groups, 32, v_size, case.get("kv_type", "f32"))
    ours, exact = device.new_kv_cache(*shape), NUMPY.new_kv_cache(*shape)
    assert ours.nbytes == torch_attention.kv_bytes(*shape)
    sinks = normal(heads, seed=9) if case.get("sinks") else None
    for i, (seq, pos) in enumerate(
        [([0] * 7, range(7)), ([0] * 6, range(7, 13)), ([1] * 3, range(3)), ([0, 1], [13, 3])]
    ):
        step = Step(np.zeros(len(seq), np.int32), np.array(pos, np.int32), np.array(seq, np.int32))
        q, k, v = (
            normal(len(seq), n, 32, seed=i * 3 + j) for j, n in enumerate((heads, groups, groups))
        )
        v = None if v_size == 0 else v
        rest = dict(scale=0.2, window=case.get("window", 0), v_size=case.get("v_size", 0))
        y = device.attention(
            *(None if a is None else torch.from_numpy(a) for a in (q, k, v)),
            ours,
            0,
            step,
            sinks=None if sinks is None else torch.from_numpy(sinks),
            **rest,
        )
        close(
            y,
            NUMPY.attention(q, k, v, exact, 0, step, sinks=sinks, **rest),
            2e-3 if "kv_type" in case else 1e-5,
        )


def test_routing_is_the_reference(device):
    logits = normal(4, 8)
    ours = device.route(torch.from_numpy(logits), 2, RouterRule(normalize=True))
    exact = NUMPY.route(logits, 2, RouterRule(normalize=True))
    assert np.array_equal(ours.expert_ids, exact.expert_ids)
    close(ours.weights, exact.weights, 1e-6)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("n_token", [1, 9])
def test_experts(device, activation, n_token):
    experts, routing = layer_experts(activation), random_routing(n_token)
    x = normal(n_token, 256)
    close(device.moe(torch.from_numpy(x), routing, experts), NUMPY.moe(x, routing, experts), 1e-5)


def layer_experts(activation="silu", kinds=(Q.Q4_K, Q.Q4_K, Q.Q6_K), n_expert=6):
    shapes = [(256, 256)] * 3
    stacks = [
        tuple(random_tensor(k, s, seed=9 * e + r, size=0.1) for e in range(n_expert))
        for r, (k, s) in enumerate(zip(kinds, shapes))
    ]
    biases = (
        [None] * 3 if activation == "silu" else [normal(n_expert, 256, seed=s) for s in (1, 2, 3)]
    )
    return LayerExperts(0, *stacks, activation, *biases)


def random_routing(n_token, n_expert=6, n_used=2, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((n_token, n_expert)))[:, :n_used].astype(np.int32)
    weights = rng.random((n_token, n_used)).astype(np.float32)
    return Routing(ids, weights, np.bincount(ids.ravel(), minlength=n_expert))


def test_a_part_of_the_experts_counts_the_rest_as_zero(device):
    experts, routing, x = layer_experts(), random_routing(5), normal(5, 256)
    e = device.experts(experts)
    memory = torch.zeros(6 * e.layout.nbytes, dtype=torch.uint8)
    for i in range(6):
        for m, t in zip(e.layout.matrices, experts.matrices(i)):
            start = i * e.layout.nbytes + m.at
            memory[start : start + m.nbytes] = torch.from_numpy(t.data.copy())
    offsets = np.arange(6, dtype=np.int64) * e.layout.nbytes
    offsets[5], moved = -1, offsets[5]
    parts = [
        device.compute(torch.from_numpy(x), memory, e, routing, np.array(ids), offsets)
        for ids in ([0, 4], [1, 2, 3])
    ]
    with pytest.raises(ValueError, match="in no slot"):
        device.compute(torch.from_numpy(x), memory, e, routing, np.array([1, 5]), offsets)
    offsets[5] = moved
    parts.append(
        device.compute(torch.from_numpy(x), memory, e, routing, np.array([5]), offsets)
    )
    close(sum(parts), NUMPY.moe(x, routing, experts), 1e-5)


def test_bad_requests_are_named(device):
    with pytest.raises(UnsupportedError, match="blk.0.x has the type IQ2_S"):
        device.weight(Tensor("blk.0.x", Q.IQ2_S, (1, 256), np.zeros(82, np.uint8)))
    with pytest.raises(InputError, match="'q4' is unknown: choose f16, q8_0 or f32"):
        device.new_kv_cache(1, 1, 8, 1, 32, 32, "q4")
    with pytest.raises(InputError, match="multiples of 32, found 48"):
        device.new_kv_cache(1, 1, 8, 1, 48, 32, "q8_0")
    mixed = layer_experts()
    mixed = LayerExperts(3, (mixed.gate[0], mixed.down[0]), mixed.up[:2], mixed.down[:2])
    with pytest.raises(UnsupportedError, match="layer 3: gate matrices of the types Q4_K, Q6_K"):
        device.moe(torch.zeros(1, 256), random_routing(1, 2, 1), mixed)


@pytest.mark.parametrize("n_token", [1, 5])
def test_fused_attention_is_the_same(n_token):
    """What a GPU uses for a half-precision cache, here in float32."""
    q, k, v = (
        torch.from_numpy(normal(*s, seed=i))
        for i, s in enumerate([(n_token, 6, 32), (9, 2, 32), (9, 2, 32)])
    )
    places = torch.arange(9 - n_token, 9)
    seen = torch_attention._seen(places, 0, 9, 4 if n_token > 1 else 0)
    exact = torch_attention._block(q, k, v, seen, 0.3, None)
    close(torch_attention.fused_block(q, k, v, seen, 0.3), exact.numpy(), 1e-5)


def test_what_is_read_back_stays_for_one_more_call():
    read, shapes = ReadBack(torch.device("cpu")), ((1, 3), (2, 2), (40, 50), (1, 1))
    given = [[torch.from_numpy(normal(*s, seed=i + 9 * j)) for j, s in enumerate(shapes)]
             for i in range(5)]  # fmt: skip
    kept = []
    for arrays in given:
        kept.append(read(*arrays))
        for back, sent in zip(kept[-2:], given[len(kept) - len(kept[-2:]) :]):
            assert all(np.array_equal(a, b.numpy()) for a, b in zip(back, sent))


def test_a_table_is_not_written_while_it_may_be_read(monkeypatch):
    """Host memory of a table is used again only after the device has been waited for."""
    waits, table = [], PairTable(torch.device("cpu"), 6, apart=True)
    monkeypatch.setattr(PairTable, "_wait", lambda t: (waits.append(1), t.waited()))
    routing, offsets = random_routing(2), np.arange(6, dtype=np.int64)
    built = [table.build(routing, np.arange(6), offsets + 6 * i) for i in range(TURNS)]
    assert not waits and len({id(pairs.table) for pairs in built}) == TURNS
    assert [int(pairs.table[0]) for pairs in built] == [6 * i for i in range(TURNS)]
    table.waited()
    for _ in range(TURNS):
        table.build(routing, np.arange(6), offsets)
    assert not waits
    table.build(routing, np.arange(6), offsets + 5)
    assert waits == [1] and int(table.table[0]) == 5


@pytest.mark.parametrize("version,there", [("3.2.0", False), ("3.3.1", True), ("4.0.0", True)])
def test_a_triton_that_is_too_old_is_not_used(monkeypatch, version, there):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    assert (TorchDevice(torch.device("cpu"), fused=True).kernels is not None) == there
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not there
    assert TorchDevice(torch.device("cpu"), fused=True).kernels is None
