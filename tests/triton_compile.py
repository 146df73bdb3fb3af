"""Compiles the Triton kernels for GPUs that are not there.

    python -m tests.triton_compile [ARCHITECTURE [TYPE]]

Prints which loads from memory each one has, and its shared memory: the interpreter shows neither.
"""

import re
import sys
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dali_gguf.offload.triton_blocks import LAYOUTS
from dali_gguf.offload.triton_kernels import dot_kernel, vector_kernel
from dali_gguf.offload.triton_matmul import TILES

ARCHITECTURES = (75, 86, 90)
SHARED = {75: 64 << 10, 86: 99 << 10, 90: 227 << 10}  # most a program may use
POINTERS = {"x": "*fp32", "base": "*u8", "bias": "*fp32", "bias2": "*fp32", "jobs": "*i64",
            "out": "*fp32", "x_scale": "*fp32"}  # fmt: skip
ALIGNED = ("x", "base", "role", "role2", "out", "jobs", "cols", "n_rows", "row_bytes")


def compiled(kernel, kind, architecture: int):
    """A kernel for gate and up of one type."""
    lay, vector = LAYOUTS[kind], kernel is vector_kernel
    constants = {"KIND": int(kind), "ACT": 1, "BIAS": False, "BY_PAIR": False, "G": lay.groups,
                 "RUN": lay.run, "PLANES": lay.planes, "NT": 1 if vector else TILES.dot_tokens,
                 "R": TILES.vector_rows if vector else TILES.dot_rows}  # fmt: skip
    types = POINTERS if vector else POINTERS | {"x": "*fp16"}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in ALIGNED},
    )
    warps = TILES.vector_warps if vector else TILES.dot_warps
    options = {"num_warps": warps, "num_stages": TILES.dot_stages}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def main() -> None:
    """Exit status 1 if a kernel needs more shared memory than a card has."""
    architectures = [int(sys.argv[1])] if len(sys.argv) > 1 else ARCHITECTURES
    kinds = [k for k in LAYOUTS if k.name in sys.argv[2:]] or LAYOUTS
    too_large = 0
    for architecture in architectures:
        for kind in kinds:
            for kernel, name in ((vector_kernel, "vector"), (dot_kernel, "dot")):
                made = compiled(kernel, kind, architecture)
                loads = Counter(re.findall(r"ld\.global\.([\w.]+)", made.asm["ptx"]))
                fits = made.metadata.shared <= SHARED[architecture]
                too_large += not fits
                print(
                    f"{'ok' if fits else 'TOO LARGE'} sm_{architecture} {kind.name} {name}: shared "
                    f"{made.metadata.shared}, loads {dict(loads)}",
                    flush=True,
                )
    raise SystemExit(too_large > 0)


if __name__ == "__main__":
    main()
