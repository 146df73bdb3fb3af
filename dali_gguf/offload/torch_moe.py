"""A layer's experts computed on a torch device from the bytes in its slots.

An expert lies in one stretch of bytes: gate, up, down, each beginning at a multiple of vram.ALIGN.
The fused kernels take all experts of a step in three launches; without them every expert is
dequantized and multiplied on its own.
"""

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor as Array
from torch.nn import functional as F

from dali_gguf.errors import UnsupportedError
from dali_gguf.offload.cuda_launch import is_plain
from dali_gguf.offload.expert_pairs import Pairs
from dali_gguf.offload.pair_table import PairTable
from dali_gguf.offload.torch_dequantize import DECODERS, dequantize
from dali_gguf.offload.vram import aligned
from dali_gguf.routing import LayerExperts, Routing

ROLES = ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where one of an expert's three matrices lies in its slot."""

    kind: GGMLQuantizationType
    rows: int
    cols: int
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The slot of one layer's experts: gate, up and down, and nbytes in all."""

    gate: Matrix
    up: Matrix
    down: Matrix
    nbytes: int
    activation: str

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down


def layout_of(experts: LayerExperts) -> ExpertLayout:
    """UnsupportedError if the experts of a layer differ in type or have one that is not read."""
    at, parts = 0, []
    for role in ROLES:
        stack = getattr(experts, role)
        kinds = {t.type for t in stack}
        if len(kinds) > 1 or stack[0].type not in DECODERS:
            names = ", ".join(sorted(k.name for k in kinds))
            raise UnsupportedError(
                f"layer {experts.layer}: {role} matrices of the types {names} do "
                "not run on the GPU: use --device cpu"
            )
        first = stack[0]
        parts.append(Matrix(first.type, first.rows, first.cols, at, first.nbytes))
        at += aligned(first.nbytes)
    return ExpertLayout(*parts, at, experts.activation)


class DeviceExperts:
    """What a layer's experts need on the device besides their matrices: layout and biases."""

    def __init__(self, device: torch.device, experts: LayerExperts):
        self.layout = layout_of(experts)
        raw = (experts.gate_bias, experts.up_bias, experts.down_bias)
        self.biases = tuple(
            None if b is None else torch.from_numpy(np.array(b, np.float32)).to(device) for b in raw
        )
        self._fused: tuple | None | bool = False  # not asked for yet
        self.one_token: dict = {}  # expert_launch.OneToken by experts used, once there was a step

    def fused(self, kernels) -> tuple | None:
        """(gate and up, down) as kernels.Matrices, None if there is no kernel for them. kernels:
        the module triton_matmul."""
        if self._fused is False:
            self._fused = self._matrices(kernels)
        return self._fused

    def _matrices(self, kernels) -> tuple | None:
        g, u, d = matrices = self.layout.matrices
        if g.kind != u.kind or not all(kernels.supports(m.kind, m.cols) for m in matrices):
            return None
        gate_bias, up_bias, down_bias = self.biases
        activation = self.layout.activation
        return (
            kernels.Matrices(
                g.kind, g.rows, g.cols, g.at, u.at, activation, gate_bias, up_bias
            ),
            kernels.Matrices(d.kind, d.rows, d.cols, d.at, bias=down_bias),
        )


def compute(
    kernels,
    x: Array,
    base: Array,
    e: DeviceExperts,
    table: PairTable,
    routing: Routing,
    experts: np.ndarray,
    offsets: np.ndarray,
) -> Array:
    """The weighted sum of these experts' outputs, float32 [T, D]; other experts count as zero.

    kernels: the module triton_matmul or None. x [T, D]; base: uint8, the memory with the slots;
    experts int64 [n]; offsets int64 [E]: of their bytes in base, by expert."""
    n_token, n_used = routing.expert_ids.shape
    known = e.one_token.get(n_used) if n_token == 1 else None
    if known is not None and is_plain(x):
        return known(x, base, table, routing, experts, offsets)
    pairs = table.build(routing, experts, offsets)
    fused = None if kernels is None else e.fused(kernels)
    if fused is None:
        return _plain(x, base, e, pairs, routing)
    y = kernels.experts(x, base, *fused, pairs, table)
    launches = kernels.one_token(*fused, n_used, table) if n_token == 1 else None
    if launches is not None:
        e.one_token[n_used] = launches
    return y


def _plain(x: Array, base: Array, e: DeviceExperts, p: Pairs, routing: Routing) -> Array:
    t = p.table
    first = t[p.at_first : p.at_first + p.n_jobs + 1]
    source = torch.from_numpy(t[p.at_source : p.at_source + p.n_pairs].copy()).to(x.device)
    pairs = torch.empty((p.n_pairs, e.layout.down.rows), device=x.device)
    for j in range(p.n_jobs):
        a, b = int(first[j]), int(first[j + 1])
        slot = base[t[j] : t[j] + e.layout.nbytes]
        pairs[a:b] = one_expert(x[source[a:b]], slot, e, int(t[p.at_expert + j]))
    place = t[p.at_place : p.at_place + p.n_token * p.n_used].reshape(p.n_token, p.n_used)
    weights = torch.from_numpy(np.where(place < 0, np.float32(0), routing.weights)).to(x.device)
    chosen = pairs[torch.from_numpy(np.maximum(place, 0)).to(x.device)]  # [T, A, D]
    return torch.einsum("tad,ta->td", chosen, weights)


def one_expert(x: Array, slot: Array, e: DeviceExperts, expert: int) -> Array:
    """x [n, D] through the expert whose bytes are `slot`, dequantized on the way: [n, D]."""
    dense = [
        dequantize(slot[m.at : m.at + m.nbytes], m.kind, m.rows, m.cols) for m in e.layout.matrices
    ]
    bias = [None if b is None else b[expert] for b in e.biases]
    gate, up = F.linear(x, dense[0], bias[0]), F.linear(x, dense[1], bias[1])
    h = swiglu_oai(gate, up) if e.layout.activation == "swiglu_oai" else F.silu(gate) * up
    return F.linear(h, dense[2], bias[2])


def swiglu_oai(gate: Array, up: Array) -> Array:
    """gpt-oss: gate clamped from above, up from both sides, and (up + 1) as the second factor."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)
