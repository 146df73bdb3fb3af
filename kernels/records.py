"""Job records: int64 words that carry sizes and addresses to the threads."""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from dali_gguf.kernels.simd import I64, OPTIONS, load_ir


def merged(function):
    """A piece that Numba merges into its callers before compiling them.

    A jitted function is compiled once more within every caller, and once for each literal
    argument: seconds for a deep kernel. A merged piece is compiled with its caller only, but
    nesting them costs Numba time too: small operations are better intrinsics.
    """
    return njit(inline="always", **OPTIONS)(function)


@intrinsic
def word(typing, record, index):
    """Word `index` of the record at an address."""

    def gen(context, b, sig, args):
        return load_ir(b, b.add(args[0], b.mul(args[1], ir.Constant(I64, 8))), I64)

    return types.intp(types.intp, types.intp), gen


@intrinsic
def padded(typing, size, to):
    """size >= 0 rounded up to a multiple of `to`."""

    def gen(context, b, sig, args):
        more = b.sub(b.add(args[0], args[1]), ir.Constant(I64, 1))
        return b.mul(b.udiv(more, args[1]), args[1])

    return types.intp(types.intp, types.intp), gen
