"""The Device protocol on a torch device: a CUDA card, or the CPU standing in for one (cpu-torch).

Weights keep their GGUF blocks. A product runs in a fused Triton kernel where the type has one and
Triton is there; otherwise the matrix is dequantized first, which is slower but always right.
Arrays are float32 torch tensors. Shapes as in dali_gguf/device.py.
"""

from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor as Array
from torch.nn import functional as F

from dali_gguf import router
from dali_gguf.device import RopeParams, Step
from dali_gguf.errors import UnsupportedError
from dali_gguf.offload import torch_attention, torch_moe
from dali_gguf.offload.pair_table import PairTable
from dali_gguf.offload.read_back import ReadBack
from dali_gguf.offload.torch_attention import Places, TorchKV
from dali_gguf.offload.torch_dequantize import DECODERS, dequantize
from dali_gguf.offload.torch_weight import TorchWeight
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor


OLDEST_TRITON = (3, 3)  # torch 2.7's; earlier ones do not compile the kernels


class TorchDevice:
    """device: where everything lies. fused: Triton kernels (None: where they can run)."""

    def __init__(self, device: torch.device, fused: bool | None = None):
        self.device = device
        self._is_cpu = device.type == "cpu"
        self.apart = not self._is_cpu  # its memory is not the host's
        self.name = str(device) if device.type == "cuda" else "cpu-torch"
        self.kernels = _triton(device, fused)
        self.weights: list[TorchWeight] = []
        self._step: Step | None = None  # the step that _places belongs to
        self._places: Places | None = None
        self._turn: tuple | None = None  # the rope and positions that _angles belongs to
        self._angles: tuple[Array, Array] | None = None
        self._pairs: dict[int, PairTable] = {}  # by number of experts
        self._experts: dict[int, torch_moe.DeviceExperts] = {}  # by layer
        self._kept: dict = {}  # launches of kernels.rope and rms_norm
        self._reader: ReadBack | None = None
        self._router = None  # kernels.route.route, from its first use on

    def inference(self) -> AbstractContextManager:
        return torch.inference_mode()  # views cost half as much

    # ---- weights ---------------------------------------------------------------------------

    def weight(self, tensor: Tensor) -> TorchWeight:
        if tensor.type not in DECODERS:
            raise UnsupportedError(
                f"{tensor.name} has the type {tensor.type.name}, which the GPU "
                "path does not read: use --device cpu"
            )
        self.weights.append(TorchWeight(tensor, self.device))
        return self.weights[-1]

    def upload_weights(self, skip: TorchWeight | None = None) -> None:
        """All of them now, so that memory that runs out does so before the first step."""
        for weight in self.weights:
            if weight is not skip:
                weight.data  # noqa: B018

    def release(self) -> None:
        """Memory that nothing uses any more goes back to the driver."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def vector(self, tensor: Tensor) -> Array:
        return TorchWeight(tensor, self.device).dense().clone()

    def embed(self, ids: np.ndarray, table: TorchWeight) -> Array:
        t = table.tensor
        rows = t.data.reshape(-1, t.row_bytes)[ids]
        return dequantize(self.from_host(rows), t.type, len(ids), t.cols)

    # ---- products --------------------------------------------------------------------------

    def matmul(self, x: Array, *weights: TorchWeight) -> tuple[Array, ...]:
        """Weights that all have a fused kernel in one call, else each in its own way."""
        fused = [None if self.kernels is None else w.fused(self.kernels) for w in weights]
        if None not in fused:
            return self.kernels.matmul(x, *((w.data, m) for w, m in zip(weights, fused)))
        if len(weights) == 1:
            return (F.linear(x, weights[0].dense()),)
        return tuple(self.matmul(x, w)[0] for w in weights)

    def batched_matmul(self, x: Array, weight: TorchWeight) -> Array:
        return torch.einsum("thn,hmn->thm", x, weight.dense())

    def add(self, x: Array, y: Array) -> Array:
        return x.add_(y)

    def start_recording(self, step: Step) -> None:
        return None

    def stop_recording(self) -> None: ...

    # ---- elementwise -----------------------------------------------------------------------

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        if self.kernels is not None and x.is_contiguous():
            return self.kernels.rms_norm(x, weight, eps, self._kept)
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def rope(self, x: Array, positions: np.ndarray, params: RopeParams,
             norm: tuple[Array, float] | None = None) -> Array:
        cos, sin = self._cos_sin(positions, params)
        if self.kernels is not None and x.is_contiguous():
            return self.kernels.rope(x, cos, sin, params, norm, self._kept)
        x = x if norm is None else self.rms_norm(x, *norm)
        n = params.n_rot
        part = x[..., :n]
        if params.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = part[..., : n // 2], part[..., n // 2 :]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], -1)

    def _cos_sin(self, positions: np.ndarray, params: RopeParams) -> tuple[Array, Array]:
        """[T, 1, n_rot/2] each: the same for every layer of a step, so made once."""
        if self._turn is None or self._turn[0] is not params or self._turn[1] is not positions:
            angle = positions[:, None, None] * params.inv_freq
            both = np.stack([np.cos(angle), np.sin(angle)]) * params.magnitude
            both = self.from_host(both.astype(np.float32))
            self._turn, self._angles = (params, positions), (both[0], both[1])
        return self._angles

    def concat(self, *arrays: Array) -> Array:
        """Along the last axis, the other axes broadcast."""
        lead = torch.broadcast_shapes(*(a.shape[:-1] for a in arrays))
        return torch.cat([a.expand(*lead, a.shape[-1]) for a in arrays], dim=-1)

    def swiglu(self, gate: Array, up: Array) -> Array:
        return F.silu(gate) * up

    def sigmoid(self, x: Array) -> Array:
        return x.sigmoid()

    # ---- attention -------------------------------------------------------------------------

    def new_kv_cache(
        self,
        n_layer: int,
        n_seq: int,
        n_ctx: int,
        n_head_kv: int,
        k_size: int,
        v_size: int,
        kv_type: str,
    ) -> TorchKV:
        return TorchKV(self.device, n_layer, n_seq, n_ctx, n_head_kv, k_size, v_size, kv_type)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array | None,
        cache: TorchKV,
        layer: int,
        step: Step,
        scale: float,
        window: int = 0,
        sinks: Array | None = None,
        v_size: int = 0,
    ) -> Array:
        if self._step is not step:  # once a step, not once a layer
            self._step, self._places = step, Places(step, self.device)
        places = self._places
        cache.store(layer, places, k, v)
        out = [
            torch_attention.attend(
                q[a:b],
                cache,
                layer,
                seq,
                step.positions[a:b],
                places.positions[a:b],
                scale,
                window,
                sinks,
                v_size,
            )
            for a, b, seq in places.stretches
        ]
        return out[0] if len(out) == 1 else torch.cat(out)

    # ---- experts ---------------------------------------------------------------------------

    def route(self, logits: Array, n_used: int, rule: router.RouterRule) -> Routing:
        return self.route_host(self.to_host(logits), n_used, rule)

    def route_host(self, logits: np.ndarray, n_used: int, rule: router.RouterRule) -> Routing:
        """route, of logits [T, E] that are on the host already."""
        if self._router is None:
            from dali_gguf.kernels.route import route  # compiles, so only when it is used

            self._router = route
        return self._router(logits, n_used, rule)

    def moe(self, x: Array, routing: Routing, experts: LayerExperts) -> Array:
        """All experts of a step, copied to the device first: no slots, nothing is kept."""
        e = self.experts(experts)
        ids = np.flatnonzero(routing.workload)
        memory = torch.empty(len(ids) * e.layout.nbytes, dtype=torch.uint8, device=self.device)
        offsets = np.full(experts.n_expert, -1, np.int64)
        for i, expert in enumerate(ids.tolist()):
            start = offsets[expert] = i * e.layout.nbytes
            for m, tensor in zip(e.layout.matrices, experts.matrices(expert)):
                place = memory[start + m.at : start + m.at + m.nbytes]
                place.copy_(torch.from_numpy(np.array(tensor.data)))
        return self.compute(x, memory, e, routing, ids, offsets)

    def experts(self, experts: LayerExperts) -> torch_moe.DeviceExperts:
        """Layout and biases of a layer's experts, made once."""
        if experts.layer not in self._experts:
            self._experts[experts.layer] = torch_moe.DeviceExperts(self.device, experts)
        return self._experts[experts.layer]

    def pair_table(self, n_expert: int) -> PairTable:
        """For layers with so many experts, made once."""
        table = self._pairs.get(n_expert)
        if table is None:
            table = self._pairs[n_expert] = PairTable(self.device, n_expert, self.apart)
        return table

    def compute(
        self,
        x: Array,
        memory: Array,
        e: torch_moe.DeviceExperts,
        routing: Routing,
        ids: np.ndarray,
        offsets: np.ndarray,
    ) -> Array:
        """The part of a layer that experts ids int64 [n] have, whose bytes lie in memory at
        offsets int64 [E], by expert."""
        table = self.pair_table(routing.workload.size)
        return torch_moe.compute(self.kernels, x, memory, e, table, routing, ids, offsets)

    def to_host(self, x: Array) -> np.ndarray:
        """float32; on the CPU the same memory."""
        x = x if x.dtype == torch.float32 else x.float()
        return x.numpy() if self._is_cpu else x.cpu().numpy()

    def read_back(self, *arrays: Array) -> list[np.ndarray]:
        """As to_host, waiting once for all; valid until the call after the next one."""
        if not self.apart:
            return [self.to_host(x) for x in arrays]
        if self._reader is None:
            self._reader = ReadBack(self.device)
        arrays = self._reader(*arrays)
        for table in self._pairs.values():
            table.waited()
        return arrays

    def from_host(self, x: np.ndarray) -> Array:
        """On the CPU the same memory."""
        x = torch.from_numpy(np.ascontiguousarray(x))
        return x if self._is_cpu else x.to(self.device)

    def close(self) -> None:
        self._experts, self._pairs, self._places, self._angles = {}, {}, None, None
        self._step = self._turn = None


def _triton(device: torch.device, fused: bool | None):
    """The module of fused kernels, or None: not wanted, or no Triton that compiles them."""
    if fused is False or (fused is None and device.type != "cuda"):
        return None
    try:
        import triton
    except ImportError:
        return None
    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < OLDEST_TRITON:
        return None
    from dali_gguf.offload import triton_matmul

    return triton_matmul
