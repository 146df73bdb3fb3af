"""Importance files (llama.cpp's imatrix, GGUF form and the older .dat): read, write, use.

An entry of a weight has sum2 [M, cols], the sums of squares of its input columns, and counts [M] or
[1], the rows summed; M is the number of experts, or of matrices of a stack. Importance of a column
is sum2 / count. Rule for an expert that saw no token: the mean of the layer's other experts, and
plain least squares where no expert saw any.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.gguf_output import (
    OutputFile,
    TensorInfo,
    V,
    Value,
    array,
    header,
    string,
    u32,
)
from dali_gguf.errors import ModelFileError
from dali_gguf.gguf_file import GGUFFile

FLOOR = 1e-6  # of the mean importance: a column never used still counts a little


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """sum2 float32 [M, cols]; counts float32 [M] or [1]."""

    sum2: np.ndarray
    counts: np.ndarray

    @property
    def coverage(self) -> tuple[int, int]:
        """Experts that saw a token, and all experts."""
        return int((self.counts > 0).sum()), len(self.counts)


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    path: str
    entries: dict[str, Entry]
    datasets: list[str]
    chunk_count: int
    chunk_size: int

    def keys(self) -> dict[str, Value]:
        """What llama-quantize notes in a file that was quantized with an importance matrix."""
        keys = {"quantize.imatrix.file": string(self.path)}
        if self.datasets:
            keys["quantize.imatrix.dataset"] = string(self.datasets[0])
        keys["quantize.imatrix.entries_count"] = u32(len(self.entries))
        keys["quantize.imatrix.chunks_count"] = u32(self.chunk_count)
        return keys

    def of(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """float32 [M, cols] of mean 1 a row, M matrices of the tensor; None: no entry, all
        alike."""
        entry = self.entries.get(name)
        if entry is None:
            return None
        cols, count = shape[-1], int(np.prod(shape[:-2]))
        if entry.sum2.size == count * cols:  # the older form keeps a stack in one row
            entry = Entry(entry.sum2.reshape(count, cols), entry.counts)
        if entry.sum2.shape not in ((count, cols), (1, cols)):
            if name == "token_embd.weight":
                return None
            found = " x ".join(map(str, entry.sum2.shape))
            raise ModelFileError(
                f"{self.path}: entry {name} is {found}, the tensor has {count} matrices of "
                f"{cols} columns; "
                "collect the importance matrix with this very model"
            )
        return np.ascontiguousarray(np.broadcast_to(normalized(entry), (count, cols)))

    def coverage_report(self) -> str:
        """One line a tensor with experts that saw no token, or one line that says all did."""
        lacking = []
        for name, entry in sorted(self.entries.items()):
            seen, count = entry.coverage
            if seen < count:
                lacking.append(
                    f"  {name}: {seen} of {count} experts saw a token, {100 * seen / count:.1f} %"
                )
        if not lacking:
            return f"{len(self.entries)} entries, every expert saw at least one token"
        head = (
            f"{len(lacking)} of {len(self.entries)} entries have experts that saw no token "
            "(they get the mean of their layer's other experts):"
        )
        return "\n".join([head, *lacking])


def normalized(entry: Entry) -> np.ndarray:
    """Column importances float32 [M, cols], mean 1 a row, never 0, by the rule above."""
    counts = np.broadcast_to(entry.counts.astype(np.float64), len(entry.sum2))[:, None]
    mean = np.divide(entry.sum2, counts, out=np.zeros(entry.sum2.shape), where=counts > 0)
    unseen = (counts[:, 0] <= 0) | (mean.sum(1) <= 0)
    if unseen.all():
        return np.ones(mean.shape, np.float32)
    rows = mean / np.maximum(mean.mean(1, keepdims=True), 1e-300)
    weight = np.where(unseen, 0.0, counts[:, 0])
    rows[unseen] = (weight[:, None] * rows).sum(0) / weight.sum()
    return np.maximum(rows, FLOOR).astype(np.float32)


def load(path: str | Path) -> Importance:
    """Reads either form. Raises ModelFileError."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    importance = _load_gguf(path) if magic == b"GGUF" else _load_dat(Path(path))
    for name, entry in importance.entries.items():
        if not (np.isfinite(entry.sum2).all() and np.isfinite(entry.counts).all()):
            raise ModelFileError(
                f"{path}: entry {name} has values that are not finite; collect it again"
            )
    return importance


def _load_gguf(path: str | Path) -> Importance:
    file = GGUFFile.open(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelFileError(
            f"{path}: general.type is {file.metadata.get('general.type')!r}, expected 'imatrix'"
        )
    entries = {}
    for name, tensor in file.tensors.items():
        if not name.endswith(".in_sum2"):
            continue
        weight = name.removesuffix(".in_sum2")
        counts = file.tensors.get(weight + ".counts")
        if counts is None or counts.type != Type.F32 or tensor.type != Type.F32:
            raise ModelFileError(f"{path}: {name} has no F32 counts beside it; collect it again")
        sum2 = tensor.data.view(np.float32).reshape(-1, tensor.cols).copy()
        entries[weight] = Entry(sum2, counts.data.view(np.float32).copy())
    if not entries:
        raise ModelFileError(f"{path}: no entries; collect it again")
    metadata = file.metadata
    return Importance(
        str(path),
        entries,
        list(metadata.get("imatrix.datasets", [])),
        int(metadata.get("imatrix.chunk_count", 0)),
        int(metadata.get("imatrix.chunk_size", 0)),
    )


def _load_dat(path: Path) -> Importance:
    """The older form holds (sum2 / count) calls; a stack of experts is one long row."""
    raw, at = path.read_bytes(), 0

    def take(layout: str):
        nonlocal at
        size = struct.calcsize("<" + layout)
        if at + size > len(raw):
            raise ModelFileError(f"{path}: neither a GGUF nor a whole .dat importance file")
        values = struct.unpack_from("<" + layout, raw, at)
        at += size
        return values[0]

    entries = {}
    for _ in range(take("i")):
        name = take(f"{take('i')}s").decode("utf-8", "replace")
        calls, size = take("i"), take("i")
        values = np.frombuffer(take(f"{4 * size}s"), np.float32)
        entries[name] = Entry(values.reshape(1, -1).copy(), np.array([max(calls, 1)], np.float32))
    if not entries:
        raise ModelFileError(f"{path}: no entries; expected an importance matrix")
    chunks = take("i") if at < len(raw) else 0
    datasets = [take(f"{take('i')}s").decode("utf-8", "replace")] if at < len(raw) else []
    return Importance(str(path), entries, datasets, chunks, 0)


def save(path: str | Path, importance: Importance) -> None:
    """Writes the GGUF form that llama-quantize and llama-imatrix read."""
    metadata = {
        "general.type": string("imatrix"),
        "imatrix.datasets": array(V.STRING, importance.datasets),
        "imatrix.chunk_count": u32(importance.chunk_count),
        "imatrix.chunk_size": u32(importance.chunk_size),
    }
    tensors, data = [], []
    for name, entry in sorted(importance.entries.items()):
        for suffix, values in ((".in_sum2", entry.sum2), (".counts", entry.counts.reshape(-1, 1))):
            tensors.append(TensorInfo(name + suffix, values.shape, Type.F32))
            data.append(np.ascontiguousarray(values, np.float32))
    head = header(metadata, tensors)
    with OutputFile(path, len(head) + sum(t.padded for t in tensors)) as out:
        out.write(head)
        for values in data:
            out.write(values.reshape(-1).view(np.uint8))
            out.pad()
        out.commit()
