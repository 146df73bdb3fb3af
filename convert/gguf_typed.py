"""The keys of a GGUF file with their exact types, so that they can be copied into another."""

import struct
from pathlib import Path

from gguf import GGUFValueType

from dali_gguf.convert.gguf_output import SCALARS, V, Value
from dali_gguf.gguf_file import open_buffer
from dali_gguf.gguf_header import Reader, read_start

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def read_typed(path: str | Path) -> dict[str, Value]:
    """All keys in file order. The file has been opened with GGUFFile before, so it is sound."""
    path = Path(path)
    reader = Reader(path, open_buffer(path, True))
    _, n_key = read_start(reader)
    metadata = {}
    for i in range(n_key):
        key = reader.name(f"key {i + 1} of {n_key}")
        type_ = GGUFValueType(_take(reader, "<I"))
        start = reader.position
        _skip(reader, type_)
        metadata[key] = Value(type_, bytes(reader.view[start : reader.position]))
    return metadata


def _take(reader: Reader, layout: str) -> int:
    (value,) = struct.unpack_from(layout, reader.view, reader.position)
    reader.position += struct.calcsize(layout)
    return value


def _skip(reader: Reader, type_: GGUFValueType) -> None:
    if type_ == V.STRING:
        _skip_strings(reader, 1)
    elif type_ == V.ARRAY:
        element, count = GGUFValueType(_take(reader, "<I")), _take(reader, "<Q")
        if element == V.STRING:
            _skip_strings(reader, count)
        else:
            reader.position += count * struct.calcsize("<" + SCALARS[element])
    else:
        reader.position += struct.calcsize("<" + SCALARS[type_])


def _skip_strings(reader: Reader, count: int) -> None:
    for _ in range(count):
        size = _take(reader, "<Q")
        reader.position += size
