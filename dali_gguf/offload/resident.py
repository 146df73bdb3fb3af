"""Weights read into memory of our own, so that the step touches no mapped page.

Faults on mapped dense weights would drag neighbouring experts into the page cache (the read-ahead
window is up to 16 MiB), and a file that shrinks would end the process with SIGBUS.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import numpy as np

from dali_gguf.offload.direct_io import Memory, ModelFile, page_floor, page_span
from dali_gguf.offload.read_queue import Read, ReadQueue
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor

PIECE = 4 << 20  # large tensors are read by several threads at once


class ResidentWeights:
    """Copies of tensors in one anonymous memory, read in the background.

    tensors: name -> Tensor with its data there, whole after wait().
    """

    def __init__(self, tensors: dict[str, Tensor], direct: bool = True):
        places, total = {}, 0
        for name, t in tensors.items():
            places[name] = total
            total += page_span(t.offset, t.nbytes)
        self.memory = Memory(max(total, 1))
        paths = {t.file for t in tensors.values()}
        self._files = {path: ModelFile(path, direct) for path in paths}
        self._ended: SimpleQueue[Read] = SimpleQueue()
        self._queue = ReadQueue(self._ended.put)
        self._waiting = 0
        for name, t in tensors.items():
            reads = self._reads(self._files[t.file], t, places[name])
            self._waiting += len(reads)
            self._queue.demand(reads)
        everything = np.frombuffer(self.memory.view, np.uint8)
        self.tensors = {}
        for name, t in tensors.items():
            start = places[name] + t.offset - page_floor(t.offset)
            self.tensors[name] = replace(t, data=everything[start : start + t.nbytes])

    def _reads(self, file: ModelFile, t: Tensor, place: int) -> list[Read]:
        """Pieces of whole pages, in order."""
        reads, start, end = [], page_floor(t.offset), t.offset + t.nbytes
        for at in range(start, end, PIECE):
            first = max(at, t.offset)
            view = self.memory.view[place + at - start : place + page_span(t.offset, t.nbytes)]
            reads.append(Read(file, first, min(at + PIECE, end) - first, view, t.name, 0))
        return reads

    def wait(self) -> None:
        """Until everything is read. Raises ModelFileError; then nothing of it may be used."""
        try:
            while self._waiting:
                error = self._ended.get().error
                self._waiting -= 1
                if error is not None:
                    raise error
        finally:
            self.close()

    def close(self) -> None:
        """Ends the reading, finished or not."""
        self._queue.close()
        for file in self._files.values():
            file.close()


@contextmanager
def read_experts(experts: LayerExperts, ids: Sequence[int]) -> Iterator[LayerExperts]:
    """A layer with these experts only, in memory that is given back at the end, whoever still knows
    it. Its number is -1: it is not the layer that devices keep tables of. Raises ModelFileError."""
    roles = {role: [getattr(experts, role)[e] for e in ids] for role in ("gate", "up", "down")}
    read = ResidentWeights({t.name: t for tensors in roles.values() for t in tensors})
    read.wait()
    matrices = {role: tuple(read.tensors[t.name] for t in roles[role]) for role in roles}
    biases = {
        name: None if getattr(experts, name) is None else getattr(experts, name)[list(ids)]
        for name in ("gate_bias", "up_bias", "down_bias")
    }
    try:
        yield replace(experts, layer=-1, **matrices, **biases)
    finally:
        read.memory.give_back(0, read.memory.nbytes)
