"""Kept launches are what Triton's own would be, to the last parameter, on a driver that only takes
notes."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("triton") is None:
    pytest.skip("Triton is not there", allow_module_level=True)

WIDTH, ROWS, USED, N_EXPERT = 64, 96, 3, 8
CHECKS = "of_a_matrix", "of_a_layer", "after_measuring", "unaligned", "what_is_not_kept", "errors"


@pytest.mark.parametrize("check", CHECKS)
def test_launches(check, tmp_path):
    run_apart("test_cuda_launch", check, tmp_path)


def run_apart(module, check, folder):
    """In a process of its own: the other tests have Triton's interpreter, without launches."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    code = f"from tests import {module} as t; t.{check}(t.notes({str(folder)!r}))"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True)
    if done.returncode == 77:
        pytest.skip("gcc or Python.h is not there")
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def notes(folder: str):
    from tests import null_driver

    if not null_driver.CAN_COMPILE:
        raise SystemExit(77)
    return null_driver.Notes(Path(folder))


def routing_of(n_token: int, seed: int = 0):
    from dali_gguf.routing import Routing

    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((n_token, N_EXPERT)))[:, :USED].astype(np.int32)
    workload = np.bincount(ids.ravel(), minlength=N_EXPERT)
    return Routing(ids, rng.random(ids.shape).astype(np.float32), workload)


def jobs_of(n_token: int):
    """Each token uses the same USED experts."""
    from dali_gguf.offload.pair_table import PairTable
    from dali_gguf.routing import Routing

    ids = np.tile(np.arange(USED, dtype=np.int32), (n_token, 1))
    routing = Routing(ids, np.ones(ids.shape, np.float32), np.bincount(ids.ravel()))
    table = PairTable(torch.device("cpu"), N_EXPERT, apart=False)
    return table.jobs(table.build(routing, np.arange(USED), np.arange(N_EXPERT) * 16))


def layer_experts(layer: int):
    from gguf import GGMLQuantizationType as Q

    from dali_gguf.routing import LayerExperts
    from tests.quant_blocks import random_tensor

    shapes = (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, ROWS)
    kinds = (Q.Q8_0, Q.Q8_0, Q.Q4_0) if layer else (Q.MXFP4,) * 3
    stacks = [
        tuple(random_tensor(kind, shape, seed=e) for e in range(N_EXPERT))
        for kind, shape in zip(kinds, shapes)
    ]
    return LayerExperts(layer, *stacks)


def launched(noted, kinds: str) -> tuple:
    """What two launches must agree in. kinds: of the parameters, p a pointer, i 32 bits."""
    values = [v if kind == "p" else v & 0xFFFFFFFF for v, kind in zip(noted.values, kinds)]
    where = noted.function, noted.stream, tuple(noted.grid), tuple(noted.block), noted.shared
    return (*where, values)


VECTOR, COMBINE = "ppiipppiiipiii", "pppiipii"
OUT = 10  # where vector_kernel is told to write


def of_a_matrix(notes):
    """With other inputs, outputs and memory than those of the first launch."""
    from gguf import GGMLQuantizationType as Q

    from dali_gguf.offload import triton_matmul as tm

    bias = torch.zeros(N_EXPERT, ROWS)
    functions = set()
    for n_token in (1, 2, 3, 4):
        for how in ({}, dict(role2=32, activation="swiglu_oai", bias=bias, bias2=bias)):
            kept = tm.Matrices(Q.MXFP4, ROWS, WIDTH, 16, **how)
            for i in range(3):
                jobs = jobs_of(n_token)
                base = torch.zeros(1 << 16, dtype=torch.uint8)
                x = torch.ones(n_token, WIDTH)
                outs = [tm.grouped(x, base, kept, jobs).data_ptr()]
                assert len(kept.kept) == 1
                fresh = tm.Matrices(Q.MXFP4, ROWS, WIDTH, 16, **how)
                outs.append(tm.grouped(x, base, fresh, jobs).data_ptr())
                ours, triton = (launched(noted, VECTOR) for noted in notes.take())
                if not how:  # a bias that is not there: any address
                    ours[-1][4:6] = triton[-1][4:6]
                assert [values.pop(OUT) for values in (ours[-1], triton[-1])] == outs
                assert ours == triton
                functions.add(ours[0])
    assert len(functions) == 6, "one and two matrices, for one, two and four tokens a program"


def of_a_layer(notes):
    """Three launches at once, whatever has moved since the first ones."""
    from dali_gguf.offload.torch_device import TorchDevice

    layers = [layer_experts(i) for i in range(2)]
    device = TorchDevice(torch.device("cpu"), fused=True)
    for i in range(12):
        n_token, experts = (1, 1, 3)[i % 3], layers[i // 3 % 2]
        routing, x = routing_of(n_token, seed=i), torch.ones(n_token, WIDTH)
        ids, memory = np.flatnonzero(routing.workload), torch.zeros(1 << 16, dtype=torch.uint8)
        offsets = np.random.default_rng(i).permutation(N_EXPERT) * 4096
        y = device.compute(x, memory, device.experts(experts), routing, ids, offsets)
        assert y.shape == (n_token, WIDTH)
        table = device._pairs[N_EXPERT]
        ours, numbers = notes.take(), table.table.numpy().copy()
        other = TorchDevice(torch.device("cpu"), fused=True)
        other.compute(x, memory, other.experts(experts), routing, ids, offsets)
        triton, its = notes.take(), other._pairs[N_EXPERT]
        assert len(ours) == len(triton) == 3
        used = 3 * len(ids) + 1 + 2 * routing.expert_ids.size
        assert (numbers[:used] == its.table.numpy()[:used]).all()
        for launches, tables in ((ours, table), (triton, its)):
            up, down, total = (noted.values for noted in launches)
            assert (up[0], up[1], down[1]) == (x.data_ptr(), memory.data_ptr(), memory.data_ptr())
            assert {up[6], down[6], total[1], total[2]} == {tables.address}
            assert (down[0], total[0]) == (up[10], down[10]), "each reads what the last one wrote"
        assert ours[2].values[5] == y.data_ptr()
        for one, its_one, kinds in zip(ours, triton, (VECTOR, VECTOR, COMBINE)):
            one, its_one = launched(one, kinds), launched(its_one, kinds)
            assert one[:5] == its_one[:5]
            assert [v for v, k in zip(one[5], kinds) if k == "i"] == [
                v for v, k in zip(its_one[5], kinds) if k == "i"
            ]
    assert [set(device.experts(experts).one_token) for experts in layers] == [{USED}, {USED}]


def after_measuring(notes):
    """Costs are measured with other numbers of experts a token, on the same layer."""
    from dali_gguf.offload.gpu_measure import Probe
    from dali_gguf.offload.torch_device import TorchDevice
    from tests import computed_kernels

    notes.compute(computed_kernels.run)
    experts, plain = layer_experts(1), TorchDevice(torch.device("cpu"))
    device = TorchDevice(torch.device("cpu"), fused=True)
    probe = Probe(device, None, experts)
    for n in (4, 1, 4, 1):
        probe.gpu_us(n, 1)
    x, memory = torch.ones(1, WIDTH), torch.from_numpy(probe.memory.numpy().copy())
    for seed in range(6):
        ids = np.random.default_rng(seed).permutation(probe.together)[None, :USED].astype(np.int32)
        weights = np.full((1, USED), 0.3, np.float32)
        routing = type(routing_of(1))(ids, weights, np.bincount(ids[0], minlength=N_EXPERT))
        used = np.flatnonzero(routing.workload)
        ours, exact = (
            d.compute(x, memory, d.experts(experts), routing, used, probe.offsets)
            for d in (device, plain)
        )
        assert (ours - exact).abs().max() < 1e-4 * exact.abs().max()
    assert set(device.experts(experts).one_token) == {1, USED, 4}


def unaligned(notes):
    """Rows that begin between two multiples of 16 bytes need another kernel, and get it."""
    from gguf import GGMLQuantizationType as Q

    from dali_gguf.offload import triton_matmul as tm

    base, m = torch.zeros(1 << 16, dtype=torch.uint8), tm.Matrices(Q.Q8_0, ROWS, WIDTH)
    x = torch.ones(WIDTH + 1)
    for start in (1, 0, 1, 0):
        tm.matmul(x[start : start + WIDTH].view(1, WIDTH), (base, m))
    noted = notes.take()
    functions = [launch.function for launch in noted]
    assert functions[0] == functions[2] != functions[1] == functions[3]
    assert [launch.values[0] % 16 for launch in noted] == [4, 0, 4, 0]


def what_is_not_kept(notes):
    """What needs more than its arguments, and what is for no card."""
    from types import SimpleNamespace as Made

    from triton.backends.compiler import GPUTarget

    from dali_gguf.offload import cuda_launch

    def made(kinds=("*fp32", "i32", "constexpr"), parameters=2, backend="cuda", left=0, **more):
        entry = ", ".join(f".param .u64 p{i}" for i in range(parameters))
        target = GPUTarget(backend, 86, 32)
        return Made(
            metadata=Made(target=target, num_ctas=1, **more),
            src=Made(
                signature={f"a{i}": kind for i, kind in enumerate(kinds)},
                fn=Made(arg_names=[f"a{i}" for i in range(len(kinds) + left)]),
            ),
            asm={"ptx": f".visible .entry f({entry})\n.reqntid 128\n{{ .param .b32 q; }}"},
        )

    assert all(cuda_launch.suits(made(parameters=n)) for n in (2, 3, 4))
    others = [made(parameters=1), made(parameters=5), made(kinds=("fp32",)), made(backend="hip")]
    others += [made(left=1), made(launch_pdl=True), made(global_scratch_size=8), None]
    assert not any(cuda_launch.suits(other) for other in others)


def errors(notes):
    """Of the driver are raised, with its number."""
    from gguf import GGMLQuantizationType as Q

    from dali_gguf.offload import triton_matmul as tm
    from dali_gguf.offload.vram import out_of_memory

    base, m = torch.zeros(1 << 16, dtype=torch.uint8), tm.Matrices(Q.Q8_0, ROWS, WIDTH)
    x = torch.ones(1, WIDTH)
    tm.matmul(x, (base, m))
    for code in (2, 700):
        notes.set("failing", code)
        with pytest.raises(RuntimeError, match="out of memory" if code == 2 else "700") as raised:
            tm.matmul(x, (base, m))
        assert out_of_memory(raised.value) == (code == 2)
