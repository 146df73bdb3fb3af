"""A weight's GGUF blocks on a torch device."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor as Array

from dali_gguf.offload.torch_dequantize import dequantize
from dali_gguf.tensor import Tensor

ALIGN = 256  # bytes: kernels load whole vectors from the start of a weight


class TorchWeight:
    """A matrix [.., rows, cols] whose GGUF blocks lie on the device from their first product on
    (an embedding table that is only looked up stays in the file)."""

    __slots__ = ("tensor", "device", "_data", "_fused")

    def __init__(self, tensor: Tensor, device: torch.device, data: Array | None = None):
        self.tensor, self.device, self._data = tensor, device, data
        self._fused: object = False  # not asked for yet

    @property
    def data(self) -> Array:
        """uint8 [nbytes] on the device."""
        if self._data is None:
            self._data = upload(self.tensor.data, self.device)
        return self._data

    def put(self, place: Array) -> None:
        """Its bytes lie at place, uint8 [nbytes] on the device, from now on."""
        if self._data is None:
            upload(self.tensor.data, self.device, place)
        else:
            place.copy_(self._data)
        self._data = place

    def fused(self, kernels):
        """It as kernels.Matrices; None if there is no kernel for it. kernels: the module
        triton_matmul."""
        if self._fused is False:
            t = self.tensor
            fits = kernels.supports(t.type, t.cols)
            self._fused = kernels.Matrices(t.type, t.rows, t.cols) if fits else None
        return self._fused

    def dense(self) -> Array:
        """float32 in the weight's shape."""
        t = self.tensor
        if t.type == GGMLQuantizationType.F32:
            return self.data.view(torch.float32).reshape(t.shape)
        rows = self.data.numel() // t.row_bytes
        return dequantize(self.data, t.type, rows, t.cols).reshape(t.shape)


def pairs_of(weights: Sequence[TorchWeight]) -> list[TorchWeight]:
    """Weights [E, D] of one type put one after another on the device, not held twice: each with the
    one after it as one weight [2E, D], and the last one alone. Empty if they differ in type or
    shape, or their bytes are no multiple of ALIGN."""
    first = weights[0].tensor
    alike = {(w.tensor.type, w.tensor.shape) for w in weights}
    if len(alike) > 1 or first.nbytes % ALIGN:
        return []
    n, device = first.nbytes, weights[0].device
    everything = torch.empty(len(weights) * n, dtype=torch.uint8, device=device)
    pairs = []
    for i, w in enumerate(weights):
        w.put(everything[i * n : (i + 1) * n])
        rows = first.rows * len(weights[i : i + 2])
        both = replace(w.tensor, shape=(rows, first.cols), data=np.empty(0, np.uint8))
        pairs.append(TorchWeight(both, device, everything[i * n : (i + 2) * n]))
    return pairs


def upload(data: np.ndarray, device: torch.device, out: Array | None = None) -> Array:
    """uint8 bytes of a mapped file as a tensor on the device (out: where to); on the CPU a copy as
    well, since a mapped file is read-only."""
    out = torch.empty(data.size, dtype=torch.uint8, device=device) if out is None else out
    piece = 64 << 20  # one staging copy at a time: a mapped file cannot be pinned
    for at in range(0, data.size, piece):
        out[at : at + piece].copy_(torch.from_numpy(np.array(data[at : at + piece])))
    return out
