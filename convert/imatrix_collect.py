"""Importance of weight columns, measured: a CPU device that sums the squares of every input.

Experts are run one at a time here instead of in the fused kernel, whose inner activations (the
inputs of the down matrices) nobody sees. Results are the model's own, only slower.
"""

from dataclasses import dataclass

import numpy as np

from dali_gguf.convert.imatrix_file import Entry
from dali_gguf.errors import NumericError
from dali_gguf.kernels.cpu import CpuDevice
from dali_gguf.kernels.matmul import Matrix
from dali_gguf.routing import LayerExperts, Routing

ALPHA, LIMIT = 1.702, 7.0  # gpt-oss's activation


@dataclass(slots=True, eq=False)
class Sums:
    """sum2 float64 [M, cols], counts float64 [M]."""

    sum2: np.ndarray
    counts: np.ndarray


class RecordingDevice(CpuDevice):
    """sums: by tensor name. output: also of the output matrix."""

    def __init__(self, threads: int | None = None, output: bool = False):
        super().__init__(threads)
        self.output = output
        self.sums: dict[str, Sums] = {}
        self._expert_matrices: dict[LayerExperts, list[tuple[Matrix, Matrix, Matrix]]] = {}

    def matmul(self, x: np.ndarray, *weights: Matrix) -> tuple[np.ndarray, ...]:
        for name in dict.fromkeys(w.tensor.name for w in weights):
            if name.startswith("blk.") or (self.output and name == "output.weight"):
                self._add(name, 1, 0, x)
        return super().matmul(x, *weights)

    def batched_matmul(self, x: np.ndarray, weight: Matrix) -> np.ndarray:
        for h in range(x.shape[1]):
            self._add(weight.tensor.name, x.shape[1], h, x[:, h])
        return super().batched_matmul(x, weight)

    def _add(self, name: str, count: int, e: int, x: np.ndarray) -> None:
        """Adds the rows of x [T, cols] to matrix e of the count matrices of a tensor."""
        sums = self.sums.get(name)
        if sums is None:
            sums = self.sums[name] = Sums(np.zeros((count, x.shape[-1])), np.zeros(count))
        squares = np.einsum("tn,tn->n", x, x, dtype=np.float64)
        if not np.isfinite(squares).all():
            raise NumericError(
                f"tensor {name}: an input is NaN or infinite; the model or its file is damaged"
            )
        sums.sum2[e] += squares
        sums.counts[e] += len(x)

    def moe(self, x: np.ndarray, routing: Routing, experts: LayerExperts) -> np.ndarray:
        """The layer's experts one by one: y [T, D]."""
        matrices = self._expert_matrices.get(experts)
        if matrices is None:
            matrices = [tuple(map(Matrix, experts.matrices(e))) for e in range(experts.n_expert)]
            self._expert_matrices[experts] = matrices
        gate, up, down = (_entry_name(t.name) for t in experts.matrices(0))
        y = np.zeros_like(x)
        for e in np.flatnonzero(routing.workload):
            tokens, slots = np.nonzero(routing.expert_ids == e)
            part = np.ascontiguousarray(x[tokens])
            for name in dict.fromkeys((gate, up)):
                self._add_expert(name, experts, e, part)
            h = activation(experts, e, *CpuDevice.matmul(self, part, *matrices[e][:2]))
            self._add_expert(down, experts, e, h)
            (out,) = CpuDevice.matmul(self, h, matrices[e][2])
            if experts.down_bias is not None:
                out = out + experts.down_bias[e]
            y[tokens] += out * routing.weights[tokens, slots][:, None]
        return y

    def _add_expert(self, name: str, experts: LayerExperts, e: int, x: np.ndarray) -> None:
        if "*" in name:  # files with a tensor an expert
            self._add(name.replace("*", str(e)), 1, 0, x)
        else:
            self._add(name, experts.n_expert, e, x)

    def entries(self) -> dict[str, Entry]:
        """What was collected. A stack that every token passes (MLA's heads) has one count, as in
        llama.cpp's files."""
        found = {}
        for name, s in self.sums.items():
            counts = s.counts if "_exps" in name else s.counts[:1]
            found[name] = Entry(s.sum2.astype(np.float32), counts.astype(np.float32))
        return found


def _entry_name(name: str) -> str:
    """The stack's tensor name of expert 0, or a pattern with * for the expert's number."""
    if "[" in name:
        return name[: name.index("[")]
    return name.replace(".0.weight", ".*.weight")


def activation(experts: LayerExperts, e: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """SwiGLU, or gpt-oss's clamped form with biases: [T, F]."""
    if experts.gate_bias is not None:
        gate, up = gate + experts.gate_bias[e], up + experts.up_bias[e]
    if experts.activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    gate, up = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    return gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
