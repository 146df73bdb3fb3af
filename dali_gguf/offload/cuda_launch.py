"""Launching kernels that Triton has compiled, in a microsecond.

A call of a jit function looks at every argument, writes its options into a string and searches for
the compiled kernel by all of that: 30 us of Python, longer than a small kernel runs. Who knows that
nothing has changed since but a few addresses and numbers keeps the compiled kernel and its
arguments as a Launch, and gives it to CUDA's driver from compiled code.
"""

import ctypes
import re
from collections.abc import Hashable
from functools import lru_cache

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

ALIGNMENT = 16  # bytes: Triton compiles another kernel for a pointer that is no multiple of it
HEAD = 8  # numbers of a Launch before those of its changing arguments
FUNCTION, GRID_X, GRID_Y, GRID_Z, THREADS, SHARED, STREAM, PARAMETERS = range(HEAD)
OUT_OF_MEMORY = 2
I32, I64 = ir.IntType(32), ir.IntType(64)


@lru_cache(maxsize=8)
def entry_of(function: str) -> int:
    """Address of a function of CUDA's driver, 0 without one."""
    try:
        return ctypes.cast(getattr(ctypes.CDLL("libcuda.so.1"), function), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return 0


@intrinsic
def _launch_kernel(context, entry, function, x, y, z, threads, shared, stream, parameters):
    """cuLaunchKernel at the address entry: CUresult. Blocks of `threads` in one dimension."""
    signature = types.int32(*[types.int64] * 9)

    def codegen(context, b, signature, args):
        entry, function, *sizes, stream, parameters = args
        x, y, z, threads, shared = (b.trunc(size, I32) for size in sizes)
        one, nothing = ir.Constant(I32, 1), ir.Constant(I64, 0)
        kind = ir.FunctionType(I32, [I64] + [I32] * 7 + [I64] * 3)
        grid_and_block = x, y, z, threads, one, one
        launch = b.inttoptr(entry, kind.as_pointer())
        return b.call(launch, [function, *grid_and_block, shared, stream, parameters, nothing])

    return signature, codegen


@njit(cache=True)
def run_with(entry, launch, stream, values):
    """A Launch on a stream, its changing arguments a tuple of values. Returns CUresult."""
    launch[STREAM] = stream
    for i in range(len(values)):
        launch[launch[HEAD + i]] = values[i]
    return _launch_kernel(
        entry, launch[FUNCTION], launch[GRID_X], launch[GRID_Y], launch[GRID_Z], launch[THREADS],
        launch[SHARED], launch[STREAM], launch[PARAMETERS],
    )  # fmt: skip


def _call(n: int):
    """An intrinsic: calls the function at an address with n 64-bit arguments: CUresult."""

    def codegen(context, b, signature, args):
        kind = ir.FunctionType(I32, [I64] * n)
        return b.call(b.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int32(*[types.int64] * (n + 1)), codegen


@intrinsic
def copy_to_device(context, entry, to, source, nbytes, stream):
    """cuMemcpyHtoDAsync."""
    return _call(4)


@intrinsic
def record_event(context, entry, event, stream):
    """cuEventRecord."""
    return _call(2)


class Launch:
    """A compiled kernel and its arguments. numbers int64: FUNCTION .. PARAMETERS; for each changing
    argument where among the numbers its value is; the addresses of all values; the values, of which
    arguments of 32 bits are the lower half; one that stands for what the kernel does not take.

    The caller keeps what an argument that does not change points at."""

    def __init__(self, made, grid: tuple[int, int, int], args: tuple, changing: tuple[str, ...]):
        """made: compiled for args, all of the function's. changing: names of those that will be
        set before each launch. The device is the one that is current now."""
        from triton.runtime import driver

        self.entry, self.made = entry_of("cuLaunchKernel"), made
        active = driver.active
        self._stream, self._device = active.get_current_stream, active.get_current_device()
        at_pointers = HEAD + len(changing)
        at = at_pointers + _n_parameters(made)
        numbers = self.numbers = np.zeros(at + _n_parameters(made) + 1, np.int64)
        address = numbers.ctypes.data
        threads, shared = 32 * made.metadata.num_warps, made.metadata.shared
        numbers[:HEAD] = made.function, *grid, threads, shared, 0, address + 8 * at_pointers
        numbers[at_pointers:at] = address + 8 * np.arange(at, len(numbers) - 1)
        kinds = made.src.signature
        given = [(name, x) for (name, kind), x in zip(kinds.items(), args) if kind != "constexpr"]
        numbers[at : at + len(given)] = [getattr(x, "data_ptr", lambda: x)() for _, x in given]
        where = {name: at + i for i, (name, _) in enumerate(given)}
        numbers[HEAD:at_pointers] = [where.get(name, len(numbers) - 1) for name in changing]

    def stream(self) -> int:
        """Address of the stream that is current."""
        return self._stream(self._device)


def keep(kept: dict, key: Hashable, made, grid: tuple[int, int, int], args: tuple,
         changing: tuple[str, ...]) -> None:
    """Puts a Launch into kept, where one can be made. made: what Triton's call has returned."""
    if suits(made):
        kept[key] = Launch(made, grid, args, changing)


def check(result: int) -> None:
    """result: CUresult."""
    if result:
        what = "out of memory" if result == OUT_OF_MEMORY else f"error {result} at a launch"
        raise RuntimeError(f"CUDA: {what}")


def is_plain(x: Tensor) -> bool:
    """Whether x is as the kernels that are kept want it."""
    return x.data_ptr() % ALIGNMENT == 0 and x.is_contiguous()


def _n_parameters(made) -> int:
    """Of the kernel, those that Triton adds included."""
    found = re.search(r"\.entry\s+\w+\s*\((.*?)\)", made.asm["ptx"], re.DOTALL)
    return found.group(1).count(".param")


def suits(made) -> bool:
    """Whether a Launch can be made: not what Triton's interpreter returns, or a kernel for other
    devices, or one that needs more of Triton's launcher than its arguments."""
    if made is None or getattr(made.metadata.target, "backend", "") != "cuda":
        return False
    m, signature = made.metadata, getattr(made.src, "signature", None)
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size",
               "profile_scratch_size", "tensordesc_meta")  # fmt: skip
    if any(getattr(m, name, None) for name in special) or getattr(m, "num_ctas", 1) != 1:
        return False
    arguments = getattr(getattr(made.src, "fn", None), "arg_names", None)
    if not arguments or list(signature or ()) != list(arguments):  # before 3.3 some are left out
        return False
    kinds = [k for k in signature.values() if k != "constexpr"]
    known = all(k[0] == "*" or k in ("i32", "i64") for k in kinds)
    fits = known and len(kinds) <= _n_parameters(made) <= len(kinds) + 2
    return fits and entry_of("cuLaunchKernel") != 0
