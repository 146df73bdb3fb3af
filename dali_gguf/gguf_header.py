"""The header of one GGUF file: keys and tensor table (versions 2 and 3, little-endian).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.tensor import Tensor

U32, U64 = Struct("<I"), Struct("<Q")
BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {  # GGUF value type -> numpy type
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
SMALLEST_KEY = 8 + 1 + 4 + 1  # bytes of a key of one letter with a one-byte value
SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8
LONGEST_NAME = 65535
MAX_DIMS = 4
PIECE = 1 << 20  # bytes of strings decoded at once


@dataclass(frozen=True, slots=True)
class Header:
    metadata: dict
    tensors: dict[str, Tensor]


class Reader:
    """A position in the bytes of a file that never passes their end."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path = path
        self.view = memoryview(data)
        self.position = 0

    @property
    def left(self) -> int:
        return len(self.view) - self.position

    def need(self, size: int, what: str) -> None:
        if size > self.left:
            raise ModelFileError(
                f"{self.path}: cut off or damaged in {what}: "
                f"{size} bytes expected at byte {self.position}, {self.left} are left"
            )

    def number(self, layout: Struct, what: str) -> int:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self.view, self.position)
        self.position += layout.size
        return value

    def name(self, what: str) -> str:
        """A key or tensor name: short, not empty, UTF-8."""
        size = self.number(U64, what)
        self.need(size, what)
        if not 0 < size <= LONGEST_NAME:
            raise ModelFileError(
                f"{self.path}: {what} has a name of {size} bytes; expected 1 to {LONGEST_NAME}"
            )
        raw = bytes(self.view[self.position : self.position + size])
        self.position += size
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(
                f"{self.path}: {what} has a name that is not UTF-8: {raw[:40]!r}"
            ) from None

    def strings(self, count: int, what: str) -> list[str]:
        """count strings, taken from the file a piece at a time."""
        self.need(count * U64.size, what)
        out: list[str] = []
        while len(out) < count:
            if self._strings_of_piece(PIECE, count, out) == 0:  # longer than the piece, or cut off
                size = self.number(U64, what)
                self.need(size, what)
                self.position -= U64.size
                self._strings_of_piece(U64.size + size, count, out)
        return out

    def _strings_of_piece(self, size: int, count: int, out: list[str]) -> int:
        """Appends the strings that lie whole in the next size bytes, until out has count; how many.

        A vocabulary has 300,000 of them, so the loop works on bytes: twice as fast as on a
        memoryview.
        """
        piece = bytes(self.view[self.position : self.position + size])
        at, end, before, int_of = 0, len(piece), len(out), int.from_bytes
        for _ in range(count - before):
            start = at + 8
            stop = start + int_of(piece[at:start], "little")
            if start > end or stop > end:
                break
            out.append(piece[start:stop].decode("utf-8", "replace"))
            at = stop
        self.position += at
        return len(out) - before

    def numbers(self, kind: int, count: int, what: str) -> np.ndarray:
        dtype = NUMBERS[kind]
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.view, dtype, count, self.position).copy()
        self.position += count * dtype.itemsize
        if kind != BOOL:
            return values
        if (values > 1).any():
            raise ModelFileError(
                f"{self.path}: {what} is a bool of value {values.max()}; expected 0 or 1"
            )
        return values.astype(bool)


def read_header(path: Path, data: np.ndarray, tensors: bool = True) -> Header:
    """Keys and tensors of the file whose bytes data is. Raises ModelFileError, UnsupportedError."""
    reader = Reader(path, data)
    n_tensor, n_key = read_start(reader)
    metadata = {}
    for i in range(n_key):
        key = reader.name(f"key {i + 1} of {n_key}")
        if key in metadata:
            raise ModelFileError(f"{path}: key {key} is there twice")
        metadata[key] = read_value(reader, key)
    return Header(
        metadata,
        read_tensors(reader, data, n_tensor, alignment_of(path, metadata)) if tensors else {},
    )


def read_start(reader: Reader) -> tuple[int, int]:
    """Number of tensors and keys, after the magic and the version."""
    path = reader.path
    if bytes(reader.view[:4]) != b"GGUF":
        raise ModelFileError(
            f"{path}: not a GGUF file: it starts with {bytes(reader.view[:4])!r}, not b'GGUF'"
        )
    reader.position = 4
    version = reader.number(U32, "the version")
    if version & 0xFFFF == 0:
        raise UnsupportedError(
            f"{path}: a big-endian GGUF file; expected little-endian, convert it again"
        )
    if version not in (2, 3):
        raise UnsupportedError(f"{path}: GGUF version {version}; versions 2 and 3 are supported")
    n_tensor, n_key = reader.number(U64, "the tensor count"), reader.number(U64, "the key count")
    if n_key * SMALLEST_KEY > reader.left or n_tensor * SMALLEST_TENSOR > reader.left:
        raise ModelFileError(
            f"{path}: cut off or damaged: "
            f"{n_key} keys and {n_tensor} tensors do not fit in {reader.left} bytes"
        )
    return n_tensor, n_key


def read_value(reader: Reader, key: str):
    what = f"key {key}"
    kind = reader.number(U32, what)
    if kind == STRING:
        return reader.strings(1, what)[0]
    if kind in NUMBERS:
        return reader.numbers(kind, 1, what)[0].item()
    if kind != ARRAY:
        raise ModelFileError(f"{reader.path}: {what} has the unknown value type {kind}")
    kind, count = reader.number(U32, what), reader.number(U64, what)
    if kind == STRING:
        return reader.strings(count, what)
    if kind not in NUMBERS:
        raise ModelFileError(f"{reader.path}: {what} is an array of the unknown value type {kind}")
    return reader.numbers(kind, count, what)


def alignment_of(path: Path, metadata: dict) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}; expected a power of two")
    return alignment


def read_tensors(
    reader: Reader, data: np.ndarray, n_tensor: int, alignment: int
) -> dict[str, Tensor]:
    """The tensor table, checked, as views of data."""
    table = [read_entry(reader, f"tensor {i + 1} of {n_tensor}") for i in range(n_tensor)]
    base = -(-reader.position // alignment) * alignment
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, offset in table:
        if name in tensors:
            raise ModelFileError(f"{reader.path}: tensor {name} is there twice")
        nbytes = byte_size(reader.path, name, kind, shape)
        if offset % alignment:
            raise ModelFileError(
                f"{reader.path}: tensor {name} starts at {offset}, not a multiple of {alignment}"
            )
        start = base + offset
        if start + nbytes > len(data):
            raise ModelFileError(
                f"{reader.path}: cut off or damaged: tensor {name} ends at byte {start + nbytes}, "
                f"the file has {len(data)}"
            )
        tensors[name] = Tensor(
            name, kind, shape, data[start : start + nbytes], str(reader.path), start
        )
    check_overlaps(reader.path, tensors)
    return tensors


def read_entry(reader: Reader, what: str) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = reader.name(what)
    what = f"tensor {name}"
    n_dims = reader.number(U32, what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise ModelFileError(
            f"{reader.path}: {what} has {n_dims} dimensions; expected 1 to {MAX_DIMS}"
        )
    dims = tuple(reader.number(U64, what) for _ in range(n_dims))
    kind = reader.number(U32, what)
    try:
        kind = GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedError(f"{reader.path}: {what} has the unknown type {kind}") from None
    return name, kind, dims[::-1], reader.number(U64, what)


def byte_size(path: Path, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Python's integers do not overflow, so huge dimensions just do not fit."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if min(shape) < 1 or shape[-1] % block:
        raise ModelFileError(
            f"{path}: tensor {name} has the shape {list(shape)}; "
            f"expected positive sizes, rows a multiple of {block}"
        )
    size = shape[-1] // block * block_bytes
    for n in shape[:-1]:
        size *= n
    return size


def check_overlaps(path: Path, tensors: dict[str, Tensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in zip(ordered, ordered[1:]):
        if before.offset + before.nbytes > after.offset:
            raise ModelFileError(
                f"{path}: tensor {before.name} runs into the bytes of tensor {after.name}"
            )
