"""From float32 rows to the bytes of any ggml type that this program writes."""

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from numba import carray, types
from numba.extending import intrinsic

from dali_gguf.convert import quant_affine, quant_blocks, quant_symmetric
from dali_gguf.kernels.simd import jit

# kernels (x float32 [rows cols], importance float32 [cols], cols, out uint8 [rows row_bytes])
KERNELS = {
    Type.Q8_0: quant_blocks.quantize_q8_0,
    Type.Q4_0: quant_blocks.quantize_q4_0,
    Type.Q4_1: quant_blocks.quantize_q4_1,
    Type.Q5_0: quant_blocks.quantize_q5_0,
    Type.Q5_1: quant_blocks.quantize_q5_1,
    Type.Q2_K: quant_affine.quantize_q2_k,
    Type.Q3_K: quant_symmetric.quantize_q3_k,
    Type.Q4_K: quant_affine.quantize_q4_k,
    Type.Q5_K: quant_affine.quantize_q5_k,
    Type.Q6_K: quant_symmetric.quantize_q6_k,
    Type.IQ4_NL: quant_blocks.quantize_iq4_nl,
    Type.IQ4_XS: quant_symmetric.quantize_iq4_xs,
    Type.MXFP4: quant_blocks.quantize_mxfp4,
}
PLAIN = (Type.F32, Type.F16, Type.BF16)


@intrinsic
def address_as_void_pointer(typing, address):
    def gen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), gen


def row_bytes(type_: Type, cols: int) -> int:
    """Bytes of a row of cols weights; cols is a multiple of the type's block."""
    block, size = GGML_QUANT_SIZES[type_]
    return cols // block * size


@jit
def first_not_finite(x):
    """Index of the first NaN or infinity of a flat float32 array, or -1."""
    bits, largest = x.view(np.uint32), np.uint32(0)
    for i in range(bits.size):  # vectorizes: an exponent of all ones is the largest
        largest = max(largest, bits[i] & np.uint32(0x7F800000))
    if largest < np.uint32(0x7F800000):
        return -1
    for i in range(x.size):
        if not np.isfinite(x[i]):
            return i
    return -1


@jit
def bf16_to_f32(address, out):
    """bfloat16 bits at an address to float32 bits (flat uint32)."""
    bits = carray(address_as_void_pointer(address), (out.size,), dtype=np.uint16)
    for i in range(out.size):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@jit
def f32_to_bf16(bits, out):
    """float32 bits (uint32) to bfloat16 bits, nearest even; the values are finite."""
    for i in range(bits.size):
        v = bits[i]
        out[i] = np.uint16(
            (v + np.uint32(0x7FFF) + ((v >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        )


def quantize(x: np.ndarray, type_: Type, importance: np.ndarray | None = None) -> np.ndarray:
    """x float32 [rows, cols] as uint8 [rows, row_bytes]. importance: float32 [cols], mean about
    1."""
    rows, cols = x.shape
    x = np.ascontiguousarray(x, np.float32).reshape(-1)
    if type_ == Type.F32:
        return x.view(np.uint8).reshape(rows, -1)
    if type_ == Type.F16:
        return x.astype(np.float16).view(np.uint8).reshape(rows, -1)
    if type_ == Type.BF16:
        out = np.empty(x.size, np.uint16)
        f32_to_bf16(x.view(np.uint32), out)
        return out.view(np.uint8).reshape(rows, -1)
    if importance is None:
        importance = np.ones(cols, np.float32)
    out = np.empty(rows * row_bytes(type_, cols), np.uint8)
    KERNELS[type_](x, importance, cols, out)
    return out.reshape(rows, -1)
