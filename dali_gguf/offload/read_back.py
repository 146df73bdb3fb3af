"""Arrays of a device read back into host memory, with one wait for all of them."""

import numpy as np
import torch
from torch import Tensor as Array

TURNS = 2  # calls after which the memory is written again


class ReadBack:
    """On a GPU the copies go to pinned memory, so that they are queued behind the work that makes
    the arrays, and nothing but the last one is waited for."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._buffers = [self._empty(0)] * TURNS
        self._turn = 0
        self._done = torch.cuda.Event() if self.on_gpu else None

    def _empty(self, size: int) -> Array:
        return torch.empty(size, dtype=torch.float32, pin_memory=self.on_gpu)

    def __call__(self, *arrays: Array) -> list[np.ndarray]:
        """float32, valid until the call after the next one."""
        self._turn = turn = (self._turn + 1) % TURNS
        size, at, out = sum(x.numel() for x in arrays), 0, []
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = self._empty(2 * size)
        for x in arrays:
            part = self._buffers[turn][at : at + x.numel()].view(x.shape)
            part.copy_(x, non_blocking=True)
            out.append(part.numpy())
            at += x.numel()
        if self.on_gpu:
            self._done.record()
            self._done.synchronize()
        return out
