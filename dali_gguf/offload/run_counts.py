"""Counts the routing of a run, on top of what earlier runs left in NAME.dali.gguf, and keeps it
there."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from dali_gguf.errors import DaliError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.offload import counts_file
from dali_gguf.offload.counts_file import Counts
from dali_gguf.offload.record import router_matrices

ENOUGH = 64  # tokens of a run that are worth keeping
MOST = 1 << 20  # tokens that the counts look back on: beyond, older ones fade


class RunCounts:
    """path: of the model. layers: numbers of those with experts, ascending. n_used: experts of a
    token. run: int64 [L, E] tokens of this run; who counts them anyway puts its own array here
    instead of calling add."""

    def __init__(self, path: Path, file: GGUFFile, layers: list[int], n_used: int):
        routers = router_matrices(file.tensors, layers)
        self.path, self.n_used, self._mark = path, n_used, counts_file.fingerprint(routers)
        shape = (len(layers), len(routers[0]))
        self.stored = counts_file.load(path, self._mark, shape)
        self.run = np.zeros(shape, np.int64)
        self._means = np.zeros((len(layers) - 1, routers[0].shape[1]), np.float32)

    @property
    def counts(self) -> np.ndarray | None:
        """float32 [L, E] of earlier runs."""
        return None if self.stored is None else self.stored.counts

    @property
    def means(self) -> np.ndarray | None:
        """float32 [L - 1, D]: how a router's input changes to the next layer, from earlier runs."""
        return None if self.stored is None else self.stored.means

    def add(self, row: int, workload: np.ndarray) -> None:
        """One layer of one step: workload int64 [E]."""
        self.run[row] += workload

    def save(self, means: np.ndarray | None) -> None:
        """Keeps them if there is enough to keep. means None: those of earlier runs, or zeros. A
        folder that cannot be written is no error."""
        if means is None:
            means = self._means if self.means is None else self.means
        tokens = int(self.run[0].sum()) // self.n_used
        if tokens < ENOUGH:
            return
        old = self.stored or Counts(self._mark, 0, np.zeros(self.run.shape, np.float32), means)
        fade = min(1.0, MOST / (old.tokens + tokens))
        counts = ((old.counts + self.run) * fade).astype(np.float32)
        try:
            new = replace(old, tokens=int((old.tokens + tokens) * fade), counts=counts, means=means)
            counts_file.save(self.path, new)
        except DaliError as error:
            print(f"dali-gguf: {error}", file=sys.stderr)
