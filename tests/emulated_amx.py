"""Tiles of AMX and 64-byte vectors on any x86 with AVX2: what only an AMX machine has, in numpy.

pretend() must come before the kernels are imported. Then isa says that all instructions are there,
those of AVX-512 that the processor lacks become plain LLVM vectors, and those of AMX calls to the
emulation here, which follows Intel's manual (volume 2, LDTILECFG to TILEZERO): what would be a
fault there is noted in `faults`, and the instruction then does nothing. Code compiled this way
needs a cache of its own: DALI_CACHE.
"""

import ctypes
import threading
from collections import Counter

import numpy as np
from llvmlite import binding, ir

from dali_gguf.kernels import isa, simd

faults: list[str] = []
broken: set[str] = set()  # "configuration": is not loaded; "signs": all bytes count as without one
counts: Counter = Counter()  # of instructions
INTP, BYTE = ctypes.c_ssize_t, ctypes.c_int8
_callbacks = []  # kept alive


class Tiles(threading.local):
    """One thread's tiles: shapes as configured, and 16 rows of 64 bytes each."""

    def __init__(self):
        self.release()

    def release(self):
        self.configured = False
        self.rows, self.row_bytes = [0] * 8, [0] * 8
        self.data = np.zeros((8, 16, 64), np.uint8)

    def load_configuration(self, address):
        if "configuration" in broken:
            return
        raw = np.frombuffer(ctypes.string_at(address, 64), np.uint8)
        row_bytes, rows = raw[16:48].view("<u2"), raw[48:64]
        check(raw[0] == 1, f"palette {raw[0]}")
        check(raw[1] == 0, f"start row {raw[1]}")
        check(not raw[2:16].any() and not row_bytes[8:].any() and not rows[8:].any(), "reserved")
        check(row_bytes.max() <= 64 and rows.max() <= 16, "a tile that is too large")
        check(((row_bytes == 0) == (rows == 0)).all(), "a tile with rows or columns only")
        self.release()
        self.configured = True
        self.rows, self.row_bytes = rows[:8].tolist(), row_bytes[:8].tolist()

    def shape(self, tile):
        check(self.configured, "tiles are not configured")
        check(0 <= tile < 8 and self.rows[tile] > 0, f"tile {tile} has no shape")
        return self.rows[tile], self.row_bytes[tile]

    def load(self, tile, address, stride):
        rows, size = self.shape(tile)
        self.data[tile] = 0
        for r in range(rows):
            row = ctypes.string_at(address + r * stride, size)
            self.data[tile, r, :size] = np.frombuffer(row, np.uint8)

    def store(self, tile, address, stride):
        rows, size = self.shape(tile)
        for r in range(rows):
            ctypes.memmove(address + r * stride, self.data[tile, r, :size].tobytes(), size)

    def zero(self, tile):
        self.shape(tile)
        self.data[tile] = 0

    def multiply(self, c, a, b):
        """TDPBSUD: int32 c += a (int8) times b (uint8), four of each at a time."""
        (m, n_bytes), (a_rows, k_bytes), (k, b_bytes) = map(self.shape, (c, a, b))
        check(len({c, a, b}) == 3, "the same tile twice")
        check(not (n_bytes % 4 or k_bytes % 4 or b_bytes % 4), "columns are not dwords")
        check(m == a_rows and k_bytes // 4 == k and n_bytes == b_bytes, "shapes do not match")
        n = n_bytes // 4
        left = self.data[a, :m, :k_bytes].view("u1" if "signs" in broken else "i1")
        left = left.astype(np.int32).reshape(m, k, 4)
        right = self.data[b, :k, :b_bytes].astype(np.int32).reshape(k, n, 4)
        total = self.data[c, :m, :n_bytes].view(np.int32) + np.einsum("mkf,knf->mn", left, right)
        self.data[c] = 0
        self.data[c, :m, :n_bytes] = total.astype(np.int32).view(np.uint8)


class Fault(Exception):
    pass


def check(fine, what):
    if not fine:
        raise Fault(what)


tiles = Tiles()


def _symbol(name, function, *arguments):
    """A symbol by which machine code calls the function; faults are noted, for nobody can catch
    them."""

    def call(*args):
        counts[name] += 1
        try:
            function(*args)
        except Exception as error:
            faults.append(f"{name}{args}: {error!r}")

    _callbacks.append(ctypes.CFUNCTYPE(None, *arguments)(call))
    symbol = f"emulated.{function.__name__}"
    binding.add_symbol(symbol, ctypes.cast(_callbacks[-1], ctypes.c_void_p).value)
    return symbol


TILES = {
    "llvm.x86.ldtilecfg": _symbol("ldtilecfg", tiles.load_configuration, INTP),
    "llvm.x86.tilerelease": _symbol("tilerelease", tiles.release),
    "llvm.x86.tileloadd64": _symbol("tileload", tiles.load, BYTE, INTP, INTP),
    "llvm.x86.tilestored64": _symbol("tilestore", tiles.store, BYTE, INTP, INTP),
    "llvm.x86.tilezero": _symbol("tilezero", tiles.zero, BYTE),
    "llvm.x86.tdpbsud": _symbol("tdpbsud", tiles.multiply, BYTE, BYTE, BYTE),
}


def _pmaddwd(b, x, y):
    """Half by half with AVX2's."""
    n, ty = x.type.count, ir.VectorType(simd.I32, 8)
    halves = []
    for first in range(0, n, 16):
        args = [simd.shuffle(b, v, range(first, first + 16)) for v in (x, y)]
        halves.append(simd.call(b, "llvm.x86.avx2.pmadd.wd", ty, args))
    return halves[0] if n == 16 else simd.shuffle(b, halves[0], range(16), halves[1])


def _even_and_odd(b, v, extend: str):
    """i16 vectors of the even bytes and of the odd ones; extend: lshr or ashr."""
    v = b.bitcast(v, ir.VectorType(simd.I16, v.type.count // 2))
    eight, shift = simd.const("i16", [8] * v.type.count), getattr(b, extend)
    return shift(b.shl(v, eight), eight), shift(v, eight)


def _byte_pairs(b, u, s):
    return zip(_even_and_odd(b, u, "lshr"), _even_and_odd(b, s, "ashr"))


def _vpdpbusd(b, acc, u, s):
    u, s = (b.bitcast(v, ir.VectorType(simd.I8, 4 * v.type.count)) for v in (u, s))
    for x, y in _byte_pairs(b, u, s):
        acc = b.add(acc, _pmaddwd(b, x, y))
    return acc


def _pmaddubsw(b, u, s):
    """Without saturation: the kernels' sums never need it."""
    even, odd = (b.mul(x, y) for x, y in _byte_pairs(b, u, s))
    return b.add(even, odd)


VECTORS = {
    "llvm.x86.avx512.vpdpbusd.512": _vpdpbusd, "llvm.x86.avx512.vpdpbusd.256": _vpdpbusd,
    "llvm.x86.avx512.pmaddubs.w.512": _pmaddubsw, "llvm.x86.avx512.pmaddw.d.512": _pmaddwd,
}


def pretend() -> None:
    """From here on, an AMX machine."""
    native, present = simd.call, isa.WIDE

    def call(b, name, result, args):
        if name in TILES:
            return native(b, TILES[name], result, args)
        if name in VECTORS and not present:
            return VECTORS[name](b, *args)
        return native(b, name, result, args)

    simd.call = call
    isa.VNNI = isa.WIDE = isa.AMX = True
