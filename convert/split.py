"""Cutting a GGUF file into shards and joining them, with llama.cpp's names and keys.

NAME-00001-of-00003.gguf. Every shard has split.no (from 0), split.count and split.tensors.count;
the first also has all other keys. The tensors of a shard are consecutive tensors of the file.
"""

import re
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from dali_gguf.convert.gguf_output import OutputFile, TensorInfo, V, Value, header, scalar
from dali_gguf.convert.gguf_typed import SPLIT_KEYS, read_typed
from dali_gguf.convert.quantize import forget
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import SHARD_NAME, GGUFFile
from dali_gguf.tensor import Tensor

SIZE = re.compile(r"(\d+)([KMG])")
UNIT = {"K": 1000, "M": 1000**2, "G": 1000**3}
PIECE = 16 << 20


def parse_size(text: str) -> int:
    """Bytes of 300M, 2G; decimal units as in llama-gguf-split. Raises InputError."""
    match = SIZE.fullmatch(text.upper())
    if not match or not int(match[1]):
        raise InputError(f"size {text!r}: expected a number and K, M or G, for example 2G")
    return int(match[1]) * UNIT[match[2]]


def assign(
    sizes: list[int], max_tensors: int | None, max_bytes: int | None, empty_first: bool
) -> list[list[int]]:
    """Indices of the tensors of each shard, in order; a tensor larger than max_bytes gets its
    own."""
    shards: list[list[int]] = [[]] if empty_first else []
    current: list[int] = []
    for i, size in enumerate(sizes):
        full = max_tensors is not None and len(current) == max_tensors
        over = max_bytes is not None and sum(sizes[j] for j in current) + size > max_bytes
        if current and (full or over):
            shards.append(current)
            current = []
        current.append(i)
    return [*shards, current] if current else shards


def split(
    source: str | Path,
    prefix: str,
    max_tensors: int | None,
    max_bytes: int | None,
    empty_first: bool = False,
    dry_run: bool = False,
) -> list[tuple[Path, int, int]]:
    """Writes PREFIX-0000i-of-0000n.gguf; returns (path, tensors, bytes) of each shard."""
    file = GGUFFile.open(source)
    tensors = list(file.tensors.values())
    groups = assign([_info(t).padded for t in tensors], max_tensors, max_bytes, empty_first)
    keys = {k: v for k, v in read_typed(file.paths[0]).items() if k not in SPLIT_KEYS}
    outputs = []
    for i, group in enumerate(groups):
        own = keys if i == 0 else {}
        metadata = own | _split_keys(i, len(groups), len(tensors))
        outputs.append(
            (
                Path(f"{prefix}-{i + 1:05d}-of-{len(groups):05d}.gguf"),
                metadata,
                [tensors[j] for j in group],
            )
        )
    sizes = [_size(metadata, part) for _, metadata, part in outputs]
    if not dry_run:
        _write(outputs, sizes, file.paths)
    return [(path, len(part), size) for (path, _, part), size in zip(outputs, sizes)]


def merge(source: str | Path, output: str | Path) -> tuple[int, int]:
    """Joins all shards of the file that source belongs to; returns (tensors, bytes)."""
    if not SHARD_NAME.match(Path(source).name):
        raise InputError(f"{source}: not a shard; expected a name like NAME-00001-of-00003.gguf")
    file = GGUFFile.open(source)
    keys = {k: v for k, v in read_typed(file.paths[0]).items() if k not in SPLIT_KEYS}
    tensors = list(file.tensors.values())
    size = _size(keys, tensors)
    _write([(Path(output), keys, tensors)], [size], file.paths)
    return len(tensors), size


def _split_keys(number: int, count: int, tensors: int) -> dict[str, Value]:
    return {
        "split.no": scalar(V.UINT16, number),
        "split.tensors.count": scalar(V.INT32, tensors),
        "split.count": scalar(V.UINT16, count),
    }


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.name, tensor.shape, tensor.type)


def _size(metadata: dict[str, Value], tensors: list[Tensor]) -> int:
    infos = [_info(t) for t in tensors]
    return len(header(metadata, infos)) + sum(i.padded for i in infos)


def _write(
    outputs: list[tuple[Path, dict, list[Tensor]]], sizes: list[int], inputs: list[Path]
) -> None:
    """All files or none: each gets its name only when all are written."""
    with (
        ExitStack() as stack,
        tqdm(total=sum(sizes), unit="B", unit_scale=True, disable=None) as bar,
    ):
        files = []
        for (path, metadata, tensors), size in zip(outputs, sizes):
            out = stack.enter_context(OutputFile(path, size, inputs))
            out.write(header(metadata, [_info(t) for t in tensors]))
            for tensor in tensors:
                for start in range(0, tensor.nbytes, PIECE):
                    out.write(tensor.data[start : start + PIECE])
                out.pad()
                forget(tensor.data)
                bar.update(tensor.nbytes)
            files.append(out)
        for out in files:
            out.commit()
