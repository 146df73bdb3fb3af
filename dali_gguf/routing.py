"""What a router decided for one step of one layer, and the experts it chose from."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dali_gguf.tensor import Tensor


class Routing(NamedTuple):  # a dataclass would take a microsecond more to make
    """expert_ids int32 [T, A], weights float32 [T, A], workload int64 [E] = tokens per expert."""

    expert_ids: np.ndarray
    weights: np.ndarray
    workload: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class LayerExperts:
    """The expert matrices of one layer, one Tensor an expert and role, whatever form the file has.

    gate, up: E matrices [F, D]; down: E matrices [D, F]. Biases are float32 [E, F], [E, F], [E, D]
    or None. activation: "silu" (SwiGLU) or "swiglu_oai" (gpt-oss: clamped, alpha 1.702, limit 7).
    """

    layer: int
    gate: tuple[Tensor, ...]
    up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    activation: str = "silu"
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None

    @property
    def n_expert(self) -> int:
        return len(self.gate)

    def matrices(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate[e], self.up[e], self.down[e]

    def expert_bytes(self, e: int = 0) -> int:
        return sum(t.nbytes for t in self.matrices(e))
