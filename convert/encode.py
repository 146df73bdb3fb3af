"""Matrices to GGUF bytes on all cores, in order, a bounded number of rows at a time."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from dali_gguf.convert.quantizers import PLAIN, bf16_to_f32, first_not_finite, quantize, row_bytes
from dali_gguf.errors import ConvertError

CHUNK = 1 << 18  # weights of a job: 1 MB of float32, some milliseconds of work


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix still to be read. load() gives uint8 [rows, row bytes] of `type`; release()
    forgets it."""

    load: Callable[[], np.ndarray]
    type: Type
    importance: np.ndarray | None = None
    release: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """Quantizes on `pool`'s threads; `threads` jobs run while as many finished ones wait."""

    pool: ThreadPoolExecutor
    threads: int

    def encode(self, name: str, matrices: list[Matrix], target: Type) -> Iterator[np.ndarray]:
        """The bytes of a tensor: the matrices one after the other, as uint8 arrays in order."""
        pending: deque = deque()
        for matrix in matrices:
            raw = matrix.load()
            block, size = GGML_QUANT_SIZES[matrix.type]
            step = max(1, CHUNK // (raw.shape[1] // size * block))
            for first in range(0, len(raw), step):
                job = (name, raw[first : first + step], matrix, target)
                pending.append(self.pool.submit(_convert, *job))
                if len(pending) > 2 * self.threads:
                    yield pending.popleft().result()
            if matrix.release:  # before the next matrix is read: no more than one is held
                while pending:
                    yield pending.popleft().result()
                del raw, job
                matrix.release()
        while pending:
            yield pending.popleft().result()


def _convert(name: str, raw: np.ndarray, matrix: Matrix, target: Type) -> np.ndarray:
    if matrix.type == target:
        return raw.reshape(-1)
    if len(raw) == 0:
        return np.empty(0, np.uint8)
    x = to_float32(raw, matrix.type)
    bad = first_not_finite(x.reshape(-1))
    if bad >= 0:
        raise ConvertError(
            f"tensor {name}: value {x.reshape(-1)[bad]} in its data, expected finite numbers; "
            "the checkpoint is damaged or overflowed in training"
        )
    if target == Type.F16 and np.abs(x).max() > 65504:
        raise ConvertError(
            f"tensor {name}: value {np.abs(x).max():g} is beyond F16's 65504; convert to BF16 "
            f"or F32"
        )
    return quantize(x, target, matrix.importance).reshape(-1)


def to_float32(raw: np.ndarray, type_: Type) -> np.ndarray:
    """uint8 [rows, row bytes] of any type as float32 [rows, cols]."""
    rows = len(raw)
    if type_ == Type.F32:
        return np.ascontiguousarray(raw).view(np.float32)
    if type_ == Type.F16:
        return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    if type_ == Type.BF16:
        raw = np.ascontiguousarray(raw)
        out = np.empty(raw.size // 2, np.uint32)
        bf16_to_f32(raw.ctypes.data, out)
        return out.view(np.float32).reshape(rows, -1)
    return dequantize(np.ascontiguousarray(raw), type_)


def tensor_bytes(type_: Type, shape: tuple[int, ...]) -> int:
    return row_bytes(type_, shape[-1]) * int(np.prod(shape[:-1], dtype=np.int64))


__all__ = ["CHUNK", "Encoder", "Matrix", "PLAIN", "tensor_bytes", "to_float32"]
