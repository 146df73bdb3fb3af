"""Products by the tiles of AMX, which emulated_amx.py stands in for, and what the compiler makes of
them for a processor that has some.

Processes of their own, since the choice of instructions is made once, at import.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.kernels import isa, user_cache_dir
from dali_gguf.kernels.formats import FORMATS
from dali_gguf.kernels.quantize import FLOAT, Q8, QK
from tests import emulated_amx
from tests.kernel_helpers import amx_cases
from tests.test_kernels_types import product

ROOT = Path(__file__).parents[1]
TOKENS = [1, 12, 13, 15, 16, 17, 33, 64]
TYPES = [t for t in FORMATS if FORMATS[t].kind != FLOAT]

PRETEND = """
import json, sys
from pathlib import Path
import numpy as np
from gguf import GGMLQuantizationType as Q
from tests import emulated_amx
emulated_amx.pretend()
from dali_gguf import kernels
from dali_gguf.kernels import amx_check, amx_verdict, formats, isa
from dali_gguf.kernels.cpu import CpuDevice
from dali_gguf.tensor import Tensor
from tests.kernel_helpers import amx_cases, random_weights
from tests.test_kernels_types import product

def by_tiles(name, w, x):
    return product(Q[name], w, x, formats.matmat_amx_address)[0]
"""
PRODUCTS = PRETEND + """
assert isa.WIDE and isa.VNNI and isa.AMX
file, tokens, *types = json.loads(sys.argv[1])
arrays, report = {}, {}
for name in types:
    emulated_amx.counts.clear()
    for i, (w, x) in enumerate(amx_cases(Q[name])):
        for t in tokens:
            arrays[f"{name} {i} {t}"] = by_tiles(name, w, x[:t])
    report[name] = dict(emulated_amx.counts)
np.savez(file, **arrays)
print(json.dumps([report, emulated_amx.faults]))
"""
CHECKS = PRETEND + """
found = {}
amx_check.TIMED_ROWS, amx_check.ROUNDS, amx_check.TOKENS = 16, 3, (16, 31)
name, kernels.CACHE_DIR = sys.argv[1], Path(sys.argv[2])  # where the verdict will lie
found["checked"] = amx_check.check(formats.FORMATS[Q[name]]).right
emulated_amx.broken.add("signs")
found["checked without signs"] = amx_check.check(formats.FORMATS[Q[name]]).right
emulated_amx.broken.clear()

rng = np.random.default_rng(0)
x = rng.standard_normal((40, 256)).astype(np.float32)
w = random_weights(Q[name], 40, 256, rng)
outputs = {}
for speedup in (1.04, 1.05):
    amx_verdict.write({name: amx_verdict.Verdict(True, speedup)})
    amx_verdict._read_once.cache_clear()
    emulated_amx.counts.clear()
    device = CpuDevice(2)
    outputs[speedup], = device.matmul(x, device.weight(Tensor("w", Q[name], (40, 256), w.ravel())))
    found[f"tiles at {speedup}"] = emulated_amx.counts["tdpbsud"]
found["same"] = bool((outputs[1.04] == outputs[1.05]).all())
found["faults"] = len(emulated_amx.faults)
emulated_amx.broken.add("configuration")
by_tiles(name, w, x)
found["faults without configuration"] = emulated_amx.faults[-1]
print(json.dumps(found))
"""
ASSEMBLY = """
import sys
from gguf import GGMLQuantizationType as Q
from dali_gguf.kernels import isa
isa.AMX = True
assert isa.WIDE
from dali_gguf.kernels import formats
formats.matmat_amx_address(formats.FORMATS[Q[sys.argv[1]]])
print(formats._compiled[f"matmat_amx_{sys.argv[1].lower()}"]._library.get_asm_str())
"""
SAPPHIRE_RAPIDS = """sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2 lzcnt movbe
    avx512f avx512bw avx512vl avx512dq avx512cd avx512vnni avxvnni gfni amx-tile amx-int8"""

needs_avx2 = pytest.mark.skipif(not isa.AVX2, reason="emulated on AVX2")


def cache_folder() -> str:
    """For kernels compiled with the emulation: as good as its source is old."""
    source = Path(emulated_amx.__file__).read_bytes()
    return str(user_cache_dir() / f"emulated-{hashlib.sha256(source).hexdigest()[:8]}")


def start(code: str, *arguments: str, **more: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DALI_CACHE": cache_folder(), "DALI_ISA": ""}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env={**env, **more},
                            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def said(process: subprocess.Popen) -> str:
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    return out


@pytest.fixture(scope="module")
def computed(tmp_path_factory) -> tuple[dict, dict, list[str]]:
    """Arrays, counts of instructions and faults of all types; the two kinds side by side."""
    folder, arrays, counts, faults = tmp_path_factory.mktemp("amx"), {}, {}, []
    processes = {}
    for kind in (Q8, QK):
        file = folder / f"{kind}.npz"
        names = [t.name for t in TYPES if FORMATS[t].kind == kind]
        argument = json.dumps([str(file), TOKENS, *names])
        processes[file] = start(PRODUCTS, argument)
    for file, process in processes.items():
        report, wrong = json.loads(said(process))
        counts, faults = {**counts, **report}, faults + wrong
        with np.load(file) as stored:
            arrays.update(stored)
    return arrays, counts, faults


@needs_avx2
@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_tiles_give_the_same_bits(ggml_type, computed):
    arrays, counts, faults = computed
    sub = FORMATS[ggml_type].module.SUB if FORMATS[ggml_type].kind == QK else 32
    calls = products = 0
    for i, (w, x) in enumerate(amx_cases(ggml_type)):
        expected, _ = product(ggml_type, w, x)
        assert np.isfinite(np.delete(expected, 61, axis=0)).all()
        for tokens in TOKENS:
            found = arrays[f"{ggml_type.name} {i} {tokens}"]
            assert np.array_equal(found, expected[:tokens], equal_nan=True), f"{tokens} tokens"
            groups = (tokens + 3) // 16
            calls += groups > 0
            products += groups * -(-len(w) // 16) * (x.shape[1] // sub)
    assert not faults
    assert counts[ggml_type.name] == {
        "ldtilecfg": calls, "tilerelease": calls, "tilezero": products, "tileload": 2 * products,
        "tdpbsud": products, "tilestore": products,
    }


@needs_avx2
@pytest.mark.parametrize("ggml_type", [Q.Q8_0, Q.Q3_K], ids=lambda t: t.name)
def test_the_check_and_what_follows_from_it(ggml_type, tmp_path):
    found = json.loads(said(start(CHECKS, ggml_type.name, str(tmp_path))))
    assert found["checked"] and not found["checked without signs"]
    products = 3 * 2 * (8 if ggml_type == Q.Q8_0 else 16)  # of 40 rows with 40 tokens: 2 groups
    assert (found["tiles at 1.04"], found["tiles at 1.05"]) == (0, products)
    assert found["same"] and found["faults"] == 0
    assert "tiles are not configured" in found["faults without configuration"]


@pytest.mark.skipif(not isa.X86, reason="x86")
@pytest.mark.parametrize("ggml_type", [Q.Q8_0, Q.Q4_K], ids=lambda t: t.name)
def test_compiles_for_sapphire_rapids(ggml_type, tmp_path):
    """Compiled anew each time: what comes from the cache has no text."""
    features = ",".join(f"+{name}" for name in SAPPHIRE_RAPIDS.split())
    text = said(start(ASSEMBLY, ggml_type.name, NUMBA_CPU_NAME="sapphirerapids",
                      NUMBA_CPU_FEATURES=features, DALI_CACHE=str(tmp_path)))
    for name in ("ldtilecfg", "tilezero", "tileloadd", "tdpbsud", "tilestored", "tilerelease"):
        assert f"\t{name}" in text, name


def shapes(**changed: int) -> np.ndarray:
    """A configuration of three tiles that fit, 16 x 64, 8 x 64 and 16 x 32 bytes, changed."""
    raw = np.zeros(64, np.uint8)
    raw[0], raw[48:51], raw[16:22:2] = 1, (16, 8, 16), (64, 64, 32)
    for place, value in changed.items():
        raw[int(place[2:])] = value
    return raw


@pytest.mark.parametrize("changed, tiles, what", [
    ({}, (0, 2, 1), None),
    ({}, (0, 1, 2), "shapes do not match"),
    ({}, (0, 0, 1), "the same tile twice"),
    ({}, (0, 2, 3), "tile 3 has no shape"),
    ({"at48": 15}, (0, 2, 1), "shapes do not match"),
    ({"at49": 7}, (0, 2, 1), "shapes do not match"),
    ({"at18": 60}, (0, 2, 1), "shapes do not match"),
    ({"at0": 2}, (0, 2, 1), "palette"),
    ({"at48": 17}, (0, 2, 1), "too large"),
    ({"at16": 68}, (0, 2, 1), "too large"),
    ({"at51": 1}, (0, 2, 1), "rows or columns only"),
    ({"at40": 1}, (0, 2, 1), "reserved"),
], ids=str)
def test_the_emulation_knows_the_rules(changed, tiles, what):
    raw, state = shapes(**changed), emulated_amx.Tiles()
    with pytest.raises(emulated_amx.Fault, match="not configured"):
        state.multiply(*tiles)
    if what is None:
        state.load_configuration(raw.ctypes.data)
        state.multiply(*tiles)
        return
    with pytest.raises(emulated_amx.Fault, match=what):
        state.load_configuration(raw.ctypes.data)
        state.multiply(*tiles)


def test_the_emulation_by_eye():
    """-1 times 255 and three zeros; what lies beyond a tile's rows and columns is not there."""
    state, c = emulated_amx.Tiles(), np.zeros((16, 16), np.int32)
    state.load_configuration(shapes().ctypes.data)
    a, b = np.full((16, 64), -1, np.int8), np.zeros((16, 16, 4), np.uint8)
    b[:8, :, 0], b[8:] = 255, 255
    state.load(2, a.ctypes.data, 64)
    state.load(1, b.ctypes.data, 64)
    state.multiply(0, 2, 1)
    state.multiply(0, 2, 1)
    state.store(0, c.ctypes.data, 64)
    assert (c == -2 * 8 * 255).all()
