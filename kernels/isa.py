"""Which instructions the kernels may use: decided once, here, from the host's features.

DALI_ISA=generic forces plain LLVM vectors (what any other processor gets); DALI_ISA=avx2 keeps to
AVX2 where more is present. Every choice computes the same integers, so results are the same bits.
"""

import os
import platform

from llvmlite import binding


def _host_features() -> set[str]:
    listed = os.environ.get("NUMBA_CPU_FEATURES")
    if listed is not None:
        return {f[1:] for f in listed.split(",") if f.startswith("+")}
    return {name for name, present in binding.get_host_cpu_features().items() if present}


FEATURES = _host_features()
X86 = platform.machine().lower() in ("x86_64", "amd64")
_forced = os.environ.get("DALI_ISA", "")
AVX2 = X86 and {"avx2", "fma"} <= FEATURES and _forced != "generic"
# fpext from half aborts the compiler on x86 without F16C: bits are converted by hand there
HALF = (not X86) or ("f16c" in FEATURES and _forced != "generic")
NAME = "avx2" if AVX2 else "generic"
