"""Writing GGUF: typed metadata, a header known in full before the first weight, then the weights.

The file grows under a temporary name and gets its own only when it is complete.
"""

import errno
import os
import shutil
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from dali_gguf.convert.encode import tensor_bytes
from dali_gguf.errors import ConvertError

V = GGUFValueType
SCALARS = {
    V.UINT8: "B",
    V.INT8: "b",
    V.UINT16: "H",
    V.INT16: "h",
    V.UINT32: "I",
    V.INT32: "i",
    V.FLOAT32: "f",
    V.BOOL: "?",
    V.UINT64: "Q",
    V.INT64: "q",
    V.FLOAT64: "d",
}
ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Value:
    """A metadata value as it stands in a file: its type and its bytes (without the type)."""

    type: GGUFValueType
    raw: bytes


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def scalar(type_: GGUFValueType, value) -> Value:
    return Value(type_, struct.pack("<" + SCALARS[type_], value))


def u32(value: int) -> Value:
    return scalar(V.UINT32, value)


def f32(value: float) -> Value:
    return scalar(V.FLOAT32, value)


def boolean(value: bool) -> Value:
    return scalar(V.BOOL, value)


def string(value: str) -> Value:
    return Value(V.STRING, _string(value))


def array(type_: GGUFValueType, values: Iterable) -> Value:
    """An array of strings or of scalars of one type."""
    values = list(values)
    head = struct.pack("<IQ", type_, len(values))
    if type_ == V.STRING:
        return Value(V.ARRAY, head + b"".join(map(_string, values)))
    return Value(V.ARRAY, head + struct.pack(f"<{len(values)}{SCALARS[type_]}", *values))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape in numpy order, slowest first."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape)

    @property
    def padded(self) -> int:
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


def header(metadata: dict[str, Value], tensors: list[TensorInfo]) -> bytes:
    """Everything before the weights, padded."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_string(key), struct.pack("<I", value.type), value.raw]
    offset = 0
    for t in tensors:
        dims = t.shape[::-1]
        parts.append(
            _string(t.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, t.type, offset)
        )
        offset += t.padded
    raw = b"".join(parts)
    return raw + bytes(-len(raw) % ALIGNMENT)


class OutputFile:
    """A file that exists under `path` only once commit() has been called.

    Use as a context manager; leaving it in any other way removes what was written.
    """

    def __init__(self, path: str | Path, size: int, inputs: Iterable[str | Path] = ()):
        self.path, self.size = Path(path), size
        for other in inputs:
            if self.path.exists() and os.path.samefile(self.path, other):
                raise ConvertError(f"{path} is the input itself; give the output another name")
        if not self.path.parent.is_dir():
            raise ConvertError(
                f"{path}: the folder {self.path.parent} does not exist; create it first"
            )
        free = shutil.disk_usage(self.path.parent).free
        if free < size:
            raise ConvertError(
                f"{path} needs {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
                "make room or write to another disk"
            )
        self.part = self.path.with_name(self.path.name + ".part")
        self.written = 0

    def __enter__(self) -> "OutputFile":
        try:
            self.file = open(self.part, "wb", buffering=0)
        except OSError as error:
            raise ConvertError(f"{self.path} cannot be written: {error.strerror}") from error
        return self

    def write(self, data: bytes | np.ndarray) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            while view:
                count = self.file.write(view)
                self.written += count
                view = view[count:]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ConvertError(
                f"{self.path}: disk full after {self.written / 1e9:.3f} of "
                f"{self.size / 1e9:.3f} GB; "
                "nothing was left behind, make room or write to another disk"
            ) from error

    def pad(self) -> None:
        self.write(bytes(-self.written % ALIGNMENT))

    def commit(self) -> None:
        self.file.close()
        os.replace(self.part, self.path)

    def __exit__(self, kind, error, trace) -> None:
        self.file.close()
        if self.part.exists():
            self.part.unlink()
        if kind is KeyboardInterrupt:
            raise ConvertError(f"{self.path}: interrupted, nothing was left behind") from None
