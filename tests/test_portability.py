"""Every set of instructions, down to plain LLVM vectors (what other processors get), gives the same
bits as this processor's best.

A process of its own, since the choice is made once, at import.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding

CODE = """
import sys
import numpy as np
from gguf import GGMLQuantizationType as Q
from dali_gguf.kernels import isa
from dali_gguf.kernels.cpu import CpuDevice
from tests.kernel_helpers import random_weights
from dali_gguf.tensor import Tensor

device, rng, out = CpuDevice(2), np.random.default_rng(0), []
for name in sys.argv[2:]:
    w = random_weights(Q[name], 24, 512, rng)
    x = rng.standard_normal((5, 512)).astype(np.float32)
    handle = device.weight(Tensor(name, Q[name], (24, 512), w.reshape(-1)))
    out += [device.matmul(x, handle)[0], device.matmul(x[:1], handle)[0]]
out.append(device.swiglu(x, x[::-1].copy()))
np.savez(sys.argv[1], *out)
print(isa.NAME)
"""
TYPES = ["F16", "Q8_0", "Q4_0", "MXFP4", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"]


def outputs(tmp_path: Path, isa: str, without: str = "") -> tuple[str, list[np.ndarray]]:
    """isa: the most to use; without: the start of features that are not to be used."""
    file = tmp_path / f"{isa or 'native'}.npz"
    root = Path(__file__).parents[1]
    env = {**os.environ, "DALI_ISA": isa, "PYTHONPATH": str(root)}
    if without:
        host = binding.get_host_cpu_features()
        keep = ("-" if name.startswith(without) or not on else "+" for name, on in host.items())
        env["NUMBA_CPU_FEATURES"] = ",".join(sign + name for sign, name in zip(keep, host))
        env["NUMBA_CPU_NAME"] = "generic"
    done = subprocess.run([sys.executable, "-c", CODE, str(file), *TYPES], env=env, cwd=root,
                          capture_output=True, text=True, check=True)
    with np.load(file) as arrays:
        return done.stdout.strip(), [arrays[name] for name in arrays.files]


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> tuple[str, list[np.ndarray]]:
    return outputs(tmp_path_factory.mktemp("native"), "")


@pytest.mark.parametrize("level", ["generic", "avx2", "vnni", "avx512"])
def test_fewer_instructions_give_the_same_bits(level, native, tmp_path):
    best, expected = native
    used, found = outputs(tmp_path, level)
    if used == best:
        pytest.skip(f"this processor's best is {best}")
    assert used == level
    assert len(found) == 2 * len(TYPES) + 1
    for a, b in zip(expected, found):
        assert np.isfinite(a).all() and (a == b).all()


@pytest.mark.parametrize("without", ["avx512vnni", "gfni"])
def test_a_missing_feature_changes_no_bit(without, native, tmp_path):
    """As on a Skylake-X and on a Cascade Lake."""
    best, expected = native
    host = binding.get_host_cpu_features()
    if not host.get(without):
        pytest.skip(f"this processor has no {without}")
    used, found = outputs(tmp_path, "", without)
    without_vnni = "vnni" if host.get("avxvnni") else "avx2"
    assert used == (without_vnni if without == "avx512vnni" else best)
    for a, b in zip(expected, found, strict=True):
        assert (a == b).all()


def test_an_unknown_level_is_one_line():
    command = [sys.executable, "-m", "dali_gguf", "warmup", "x.gguf"]
    env = {**os.environ, "DALI_ISA": "sse9"}
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[1], capture_output=True,
                          text=True)
    assert done.returncode == 2
    assert done.stderr == "dali-gguf: DALI_ISA=sse9: known are generic avx2 vnni avx512 amx\n"
