"""Opens GGUF files: the keys, and every tensor as a view of the mapped bytes.

The header is parsed here, not by gguf-py, whose reader needs seconds for a large vocabulary.
Nothing in a file is trusted: each length, count and offset is compared with what is really there.
"""

import mmap as mmap_module
import os
import re
import stat
import sys
from pathlib import Path

import numpy as np

from dali_gguf.errors import ModelFileError
from dali_gguf.gguf_header import Header, read_header
from dali_gguf.tensor import Tensor

SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
SPARSE_FROM = 1 << 20  # smaller files may lie inside the inode and report no blocks


class GGUFFile:
    """One model: metadata of the first shard, tensors of all shards.

    metadata: numbers, str and bool as Python values, numeric arrays as numpy, strings as list[str].
    tensors: name -> Tensor, in file order. paths: the shards.
    """

    def __init__(
        self, paths: list[Path], metadata: dict, tensors: dict[str, Tensor], buffers: list
    ):
        self.paths = paths
        self.metadata = metadata
        self.tensors = tensors
        self._buffers = buffers

    @classmethod
    def open(cls, path: str | Path, tensors: bool = True, mmap: bool = True) -> "GGUFFile":
        """path: a GGUF file, or any shard of a split one.

        tensors False: the keys only (of the first shard), which also reads a file whose tensor
        table is broken. mmap False: the file is read into memory. Raises ModelFileError.
        """
        path = Path(path)
        buffer = open_buffer(path, mmap)
        header = read_header(path, buffer, tensors)
        if whole_number(header.metadata, "split.count", path, 1) < 2:
            return cls([path], header.metadata, header.tensors, [buffer])
        return cls._open_shards(path, buffer, header, tensors, mmap)

    @classmethod
    def _open_shards(
        cls, path: Path, buffer, header: Header, tensors: bool, mmap: bool
    ) -> "GGUFFile":
        paths = shard_paths(path, header.metadata)
        buffers, metadata, found = [], {}, {}
        for number, shard in enumerate(paths if tensors else paths[:1]):
            same = shard.name == path.name
            shard_buffer = buffer if same else open_buffer(shard, mmap)
            part = header if same else read_header(shard, shard_buffer, tensors)
            check_shard(shard, part.metadata, number, len(paths))
            metadata = metadata or part.metadata
            add_tensors(found, part.tensors, shard)
            buffers.append(shard_buffer)
        expected = whole_number(metadata, "split.tensors.count", paths[0], len(found))
        if tensors and expected != len(found):
            raise ModelFileError(
                f"{paths[0]}: split.tensors.count says {expected} tensors, "
                f"the {len(paths)} shards hold {len(found)}"
            )
        return cls(paths, metadata, found, buffers)

    def close(self) -> None:
        """Unmaps the file, as soon as the last view of a tensor is gone."""
        self.tensors = {}
        self._buffers = []

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_buffer(path: Path, mmap: bool) -> np.ndarray:
    """The bytes of a file, uint8 [size], mapped or read."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for ever
            raise ModelFileError(f"{path}: not a regular file; expected a GGUF file")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise ModelFileError(f"{path}: the file is empty; expected a GGUF file")
            warn_if_sparse(path, status)
            if not mmap:
                return np.fromfile(file, np.uint8)
            return np.frombuffer(
                mmap_module.mmap(file.fileno(), 0, access=mmap_module.ACCESS_READ), np.uint8
            )
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be opened: {error}") from None


def warn_if_sparse(path: Path, status: os.stat_result) -> None:
    """A file with holes is mostly a download that was interrupted: the holes read as zeros."""
    if sys.platform == "win32" or status.st_size < SPARSE_FROM:
        return
    stored = status.st_blocks * 512
    if stored < status.st_size:
        print(
            f"dali-gguf: warning: {path}: only {stored} of {status.st_size} bytes are on disk; "
            "if its download was interrupted, finish it first",
            file=sys.stderr,
        )


def shard_paths(path: Path, metadata: dict) -> list[Path]:
    """All shards of the split file that path is one of. Raises if one is missing."""
    count = whole_number(metadata, "split.count", path, 1)
    match = SHARD_NAME.match(path.name)
    if not match or int(match[3]) != count:
        raise ModelFileError(
            f"{path}: is one of {count} shards, but is not named "
            f"...-00001-of-{count:05d}.gguf; restore its name"
        )
    paths = [path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(f"{path}: shard {missing[0]}{more} of {count} is missing beside it")
    return paths


def whole_number(metadata: dict, key: str, path: Path, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int:
        raise ModelFileError(
            f"{path}: key {key} is a {type(value).__name__}; expected a whole number"
        )
    return value


def check_shard(shard: Path, metadata: dict, number: int, count: int) -> None:
    found = (
        whole_number(metadata, "split.no", shard, -1),
        whole_number(metadata, "split.count", shard, -1),
    )
    if found != (number, count):
        raise ModelFileError(
            f"{shard}: says it is shard {found[0]} of {found[1]}; "
            f"by its name it should be {number} of {count}"
        )


def add_tensors(found: dict[str, Tensor], new: dict[str, Tensor], shard: Path) -> None:
    for name, tensor in new.items():
        if name in found:
            raise ModelFileError(f"{shard}: tensor {name} is also in {found[name].file}")
        found[name] = tensor
