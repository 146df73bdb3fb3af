"""Tables of pairs (expert_pairs.py) on the device, and the host memory they are built in."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor as Array

from dali_gguf.offload.expert_pairs import Pairs, fill_table, room
from dali_gguf.routing import Routing

TURNS = 16  # tables that are built before the first one's host memory is written again
STEP = 64  # numbers: copies are a multiple of it long, so that their views serve again
SPACE_ROWS = 128  # pairs whose results find memory at hand


class Jobs(NamedTuple):  # a dataclass would take a microsecond more to make
    """A table of pairs on the device: int64 [size], the same bytes as float32, its address."""

    pairs: Pairs
    table: Array
    floats: Array
    address: int


class PairTable:
    """Where the device has memory of its own (apart), a table is copied while the host goes on, so
    its host memory is written again only after the device has been waited for, which every layer's
    routing does. Elsewhere host and device memory are one."""

    def __init__(self, device: torch.device, n_expert: int, apart: bool):
        self.device, self.apart = device, apart
        self.job_of = np.empty(n_expert, np.int64)
        self.kept: dict = {}  # launches of combine_kernel, by columns and slots
        self._space: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._turn = self._unwaited = 0
        self._grow(4096)

    def _grow(self, size: int) -> None:
        """size: a multiple of STEP."""
        self._wait()
        shape, pinned = (TURNS if self.apart else 1, size), self.device.type == "cuda"
        self._host = torch.empty(shape, dtype=torch.int64, pin_memory=pinned)
        self._numbers = [row.numpy() for row in self._host]
        first = self._host[0]
        self.table = torch.empty_like(first, device=self.device) if self.apart else first
        self.floats, self.address = self.table.view(torch.float32), self.table.data_ptr()
        self._views: dict[tuple[int, int], tuple[Array, Array]] = {}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._unwaited = 0

    def waited(self) -> None:
        """The device has done what it was given: no copy reads host memory any more."""
        self._unwaited = 0

    def next_buffer(self) -> np.ndarray:
        """int64 [size] of host memory for the next table."""
        if self._unwaited == TURNS:
            self._wait()
        if self.apart:
            self._unwaited += 1
            self._turn = (self._turn + 1) % TURNS
        return self._numbers[self._turn]

    def build(self, routing: Routing, experts: np.ndarray, offsets: np.ndarray) -> Pairs:
        """The table for experts (int64 ids), on its way to the device. offsets int64 [E]: of their
        bytes, by expert."""
        ids = routing.expert_ids
        needed = room(experts.size, ids.size)
        if needed > self._numbers[0].size:
            self._grow(-(-2 * needed // STEP) * STEP)
        buffer = self.next_buffer()
        made = fill_table(ids, routing.weights, experts, offsets, self.job_of, buffer)
        pairs = Pairs(buffer, experts.size, *made, *ids.shape)
        if self.apart:
            source, target = self._view(-(-pairs.size // STEP) * STEP)
            target.copy_(source, non_blocking=True)
        return pairs

    def jobs(self, pairs: Pairs) -> Jobs:
        """pairs: what was built last."""
        return Jobs(pairs, self.table, self.floats, self.address)

    def space(self, up: int, down: int) -> tuple[Array, Array]:
        """Memory [SPACE_ROWS, up] and [SPACE_ROWS, down], always the same, for results that only
        the launches after them read."""
        if (up, down) not in self._space:
            pair = (torch.empty((SPACE_ROWS, n), device=self.device) for n in (up, down))
            self._space[up, down] = tuple(pair)
        return self._space[up, down]

    def _view(self, size: int) -> tuple[Array, Array]:
        """The first numbers of this turn's host memory, and of the table."""
        views = self._views.get((self._turn, size))
        if views is None:
            source = self._host[self._turn, :size]
            views = self._views[self._turn, size] = source, self.table[:size]
        return views
