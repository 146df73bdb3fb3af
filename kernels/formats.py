"""The weight types the engine reads, and their compiled products, made on first use.

A template (blocks32.py, blocks256.py, floats.py, rows.py) becomes a kernel of one type by copying
its functions with the type's names as their globals. A closure would do the same, but Numba cannot
cache closures over compiled functions; a copy under a name of its own is cached like any function.
"""

from dataclasses import dataclass
from types import FunctionType, ModuleType

from gguf import GGMLQuantizationType as Q
from numba import cfunc, types

from dali_gguf.errors import UnsupportedError
from dali_gguf.kernels import (
    amx, amx_rows, amx_verdict, bf16, blocks32, blocks256, f16, f32, floats, iq4_nl, iq4_xs, isa,
    mxfp4, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0, rows,
)
from dali_gguf.kernels.dots import add_small_pairs
from dali_gguf.kernels.panel import LINE, tile_dot, tile_sums
from dali_gguf.kernels.quantize import FLOAT, Q8, QK
from dali_gguf.kernels.simd import OPTIONS, inline, inline_once, jit
from dali_gguf.kernels.sums import add_pairs

ROWS_SIGNATURE = types.void(*(types.intp,) * 10)
EXPAND_SIGNATURE = types.void(*(types.intp,) * 4)

_TEMPLATES = {FLOAT: floats, Q8: blocks32, QK: blocks256}


@dataclass(frozen=True, slots=True)
class Format:
    """One ggml type: how its activations are quantized (FLOAT, Q8 or QK) and its module."""

    type: Q
    kind: int
    module: ModuleType

    @property
    def name(self) -> str:
        return self.type.name.lower()

    @property
    def block(self) -> int:
        """Weights that share a scale in the file."""
        return {FLOAT: 1, Q8: 32, QK: 256}[self.kind]


FORMATS = {
    f.type: f
    for f in (
        Format(Q.F32, FLOAT, f32), Format(Q.F16, FLOAT, f16), Format(Q.BF16, FLOAT, bf16),
        Format(Q.Q8_0, Q8, q8_0), Format(Q.Q4_0, Q8, q4_0), Format(Q.Q4_1, Q8, q4_1),
        Format(Q.Q5_0, Q8, q5_0), Format(Q.Q5_1, Q8, q5_1), Format(Q.IQ4_NL, Q8, iq4_nl),
        Format(Q.MXFP4, Q8, mxfp4), Format(Q.Q2_K, QK, q2_k), Format(Q.Q3_K, QK, q3_k),
        Format(Q.Q4_K, QK, q4_k), Format(Q.Q5_K, QK, q5_k), Format(Q.Q6_K, QK, q6_k),
        Format(Q.IQ4_XS, QK, iq4_xs),
    )
}
_compiled: dict = {}


def format_of(ggml_type: Q, tensor_name: str) -> Format:
    """Raises UnsupportedError naming the tensor when the type is not read."""
    if ggml_type not in FORMATS:
        known = " ".join(t.name for t in FORMATS)
        raise UnsupportedError(
            f"tensor {tensor_name} has type {ggml_type.name}, which is not supported "
            f"(known: {known})"
        )
    return FORMATS[ggml_type]


def _copy(function, name: str, namespace: dict):
    """The function under another name, its globals looked up in namespace."""
    copy = FunctionType(function.__code__, namespace, name)
    copy.__qualname__, copy.__module__ = name, function.__module__
    copy.__defaults__ = function.__defaults__
    return copy


def _namespace(fmt: Format) -> dict:
    """Globals for the copies: the templates' own, the type's, and what follows from it."""
    template = _TEMPLATES[fmt.kind]
    names = {**vars(amx_rows), **vars(rows), **vars(template), **vars(fmt.module)}
    names["WEIGHTS"] = fmt.block
    if fmt.kind == FLOAT:
        return names
    sub = 32
    if fmt.kind == QK:
        sub = fmt.module.SUB
        names["SCALES"], names["MINS"] = 64 * LINE, (64 + 256 // sub) * LINE
        names["HAS_MIN"] = fmt.module.MIN == blocks256.FLOAT_MIN
        names["MIN_LINES"] = 4 if sub == 32 and names["HAS_MIN"] else 8
        names["add_sums"] = tile_sums(names["MIN_LINES"])
    else:
        lane = 127 * fmt.module.MAX_CODE * (8 if fmt.module.NIBBLES else 4)  # largest sum of a lane
        names["add_first"], names["add_second"] = (
            add_small_pairs if most <= 32767 else add_pairs for most in (lane, 2 * lane)
        )
    widen_after = max(1, min(sub // 4, 32767 // (2 * 127 * fmt.module.MAX_CODE)))
    names["tile"] = tile_dot(sub, fmt.module.SIGNED, widen_after, fmt.kind == QK)
    names["SUB"], names["PARTS"] = sub, names["WEIGHTS"] // sub
    names["amx_configure"] = amx.configure(sub)
    if fmt.kind == QK:
        names["add_product"] = amx.add_product(small=sub * 127 * fmt.module.MAX_CODE <= 32767)
    else:
        names["add_product"] = amx.add_block32(fmt.module.OFFSET != 0, fmt.module.HAS_MIN)
    return names


def _instantiate(fmt: Format) -> dict:
    """The namespace with the templates compiled lazily for one type."""
    names, template = _namespace(fmt), _TEMPLATES[fmt.kind]
    once = template.ONCE + rows.ONCE + amx_rows.ONCE
    many = template.INLINE + amx_rows.INLINE
    for function in many + once:
        if hasattr(fmt.module, function.__name__):
            continue  # the type has its own
        decorate = inline_once if function in once else inline
        copy = _copy(function, f"{function.__name__}_{fmt.name}", names)
        names[function.__name__] = decorate(copy)
    if fmt.kind != FLOAT:
        for function in rows.PIECES + amx_rows.PIECES:
            copy = _copy(function, f"{function.__name__}_{fmt.name}", names)
            names[function.__name__] = jit(copy)
        with_tiles = {**names, "tile_tokens": names["tile_tokens_amx"]}
        copy = _copy(rows.matmat, f"matmat_tiles_{fmt.name}", with_tiles)
        names["matmat_tiles"] = inline_once(copy)
    return names


def _callback(function, signature) -> int:
    options = {k: v for k, v in OPTIONS.items() if k != "nogil"}
    compiled = cfunc(signature, **options)(function)
    _compiled[function.__qualname__] = compiled  # keeps the machine code alive
    return compiled.address


def _product(fmt: Format, name: str) -> int:
    key = (fmt.type, name)
    if key not in _compiled:
        names = _instantiate(fmt)
        _compiled[key] = _callback(_copy(names[name], f"{name}_{fmt.name}", names), ROWS_SIGNATURE)
    return _compiled[key]


def matvec_address(fmt: Format) -> int:
    """Address of the type's matvec() (rows.py says what it takes); compiled on first use."""
    return _product(fmt, "matvec")


def matmat_address(fmt: Format) -> int:
    """Address of the type's matmat(); for float types the same function serves both."""
    if amx_verdict.used(fmt.type.name):
        return matmat_amx_address(fmt)
    return matmat_plain_address(fmt)


def matmat_plain_address(fmt: Format) -> int:
    """The one without AMX."""
    return _product(fmt, "matvec" if fmt.kind == FLOAT else "matmat")


def matmat_amx_address(fmt: Format) -> int:
    """The one with AMX, for types that are not float."""
    assert isa.AMX  # without it there is no room in the scratch memory either
    return _product(fmt, "matmat_amx")


def expand_address(fmt: Format) -> int:
    """Address of expand(p, n, out, scratch): n weights at p dequantized to float32 at out."""
    key = (fmt.type, "expand")
    if key not in _compiled:
        names = _instantiate(fmt)
        copy = _copy(_TEMPLATES[fmt.kind].expand, f"expand_{fmt.name}", names)
        _compiled[key] = _callback(copy, EXPAND_SIGNATURE)
    return _compiled[key]
