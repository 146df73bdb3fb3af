"""Which instructions the kernels may use: decided once, here, from the host's features.

    generic  plain LLVM vectors: what any other processor gets
    avx2     32-byte vectors, products by way of 16-bit pairs
    vnni     32-byte vectors, four products added to an int32 at once
    avx512   the same with 64-byte vectors where they pay
    amx      the same, and tiles for matrix-matrix products where warmup found them right and faster

DALI_ISA=avx2, say, keeps to that where more is present. Every choice computes the same integers, so
results are the same bits.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

from llvmlite import binding

from dali_gguf.errors import InputError


def _host_features() -> set[str]:
    listed = os.environ.get("NUMBA_CPU_FEATURES")
    if listed is not None:
        return {f[1:] for f in listed.split(",") if f.startswith("+")}
    return {name for name, present in binding.get_host_cpu_features().items() if present}


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


FEATURES = _host_features()
X86 = platform.machine().lower() in ("x86_64", "amd64")
_LEVELS = ("generic", "avx2", "vnni", "avx512", "amx")
_most = os.environ.get("DALI_ISA") or "amx"
if _most not in _LEVELS:
    raise InputError(f"DALI_ISA={_most}: known are {' '.join(_LEVELS)}")
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512vnni"} <= FEATURES


def _may_use(level: str) -> bool:
    return X86 and _LEVELS.index(level) <= _LEVELS.index(_most)


def _tiles_granted() -> bool:
    """Whether the system lets this process use tiles. Linux wants to be asked, once a process:
    a thread that uses them unasked is killed. Other systems are not asked."""
    if sys.platform != "linux":
        return False
    arch_prctl, request_permission, tile_data = (ctypes.c_long(n) for n in (158, 0x1023, 18))
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


AVX2 = _may_use("avx2") and {"avx2", "fma"} <= FEATURES
VNNI = _may_use("vnni") and AVX2 and (_AVX512 or "avxvnni" in FEATURES)
WIDE = _may_use("avx512") and VNNI and _AVX512
AMX = _may_use("amx") and WIDE and {"amx-tile", "amx-int8"} <= FEATURES and _tiles_granted()
GFNI = WIDE and "gfni" in FEATURES  # moves bits within bytes
# fpext from half aborts the compiler on x86 without F16C: bits are converted by hand there
HALF = (not X86) or ("f16c" in FEATURES and _most != "generic")
NAME = "amx" if AMX else "avx512" if WIDE else "vnni" if VNNI else "avx2" if AVX2 else "generic"
