"""The CPU as a device: dali_gguf/device.py's operations on numpy arrays, in Numba kernels."""

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from dali_gguf.device import RopeParams, Step
from dali_gguf.kernels import ahead, elementwise, moe
from dali_gguf.kernels.attention import NO_SINKS, attention, contiguous
from dali_gguf.kernels.formats import expand_address, format_of
from dali_gguf.kernels.kv import KVCache
from dali_gguf.kernels.matmul import Matrix, Plan, Workspace, multiply
from dali_gguf.kernels.moe_plan import LayerPlan, MoeSpace, MoeStep
from dali_gguf.kernels.pool import Pool
from dali_gguf.kernels.program import Program
from dali_gguf.kernels.route import route
from dali_gguf.kernels.rows import expand_weights
from dali_gguf.router import RouterRule
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor


class CpuDevice:
    """threads: default the physical cores. Calls must come from one thread at a time."""

    name = "cpu"

    def __init__(self, threads: int | None = None):
        self.pool = Pool(threads)
        self.program: Program | None = None  # while a step is recorded
        self.space = Workspace(self.pool)
        self.moe_space = MoeSpace(self.space)
        self._rope_tables = elementwise.RopeTables()
        self._plans: dict[tuple[Matrix, ...], tuple[Plan, ...]] = {}
        self._layers: dict[LayerExperts, LayerPlan] = {}

    @property
    def threads(self) -> int:
        return self.pool.threads

    # ---- weights

    def weight(self, tensor: Tensor) -> Matrix:
        return Matrix(tensor)

    def vector(self, tensor: Tensor) -> np.ndarray:
        out = np.empty(tensor.shape, np.float32)
        expand(tensor.type, tensor.name, tensor.address, out)
        return out

    def embed(self, ids: np.ndarray, table: Matrix) -> np.ndarray:
        out = np.empty((len(ids), table.cols), np.float32)
        for row, token in zip(out, ids):
            address = table.address + int(token) * table.stride
            expand(table.tensor.type, table.tensor.name, address, row)
        if self.program is not None:
            function = expand_address(table.format)
            self.program.embed(function, ids, table.address, table.stride, out)
        return out

    # ---- steps that are run again

    def inference(self) -> AbstractContextManager:
        return nullcontext()

    def start_recording(self, step: Step) -> Program | None:
        """From here on operations leave lines in a program; its own step has to be used. None in a
        class that adds to the operations, and until what runs programs is compiled."""
        if type(self) is not CpuDevice or not ahead.ready("program"):
            return None
        self.program = Program(self.pool, step)
        return self.program

    def stop_recording(self) -> None:
        self.program = None

    # ---- products

    def matmul(self, x: np.ndarray, *weights: Matrix) -> tuple[np.ndarray, ...]:
        plans = self._plans.get(weights) or self._plan(weights)
        x = contiguous(x)
        if len(plans) == 1:
            return self._multiply(plans[0], x)
        results = {}
        for plan in plans:
            results.update(zip(plan.matrices, self._multiply(plan, x)))
        return tuple(results[w] for w in weights)

    def _multiply(self, plan: Plan, x: np.ndarray) -> tuple[np.ndarray, ...]:
        results = multiply(self.space, plan, x)
        if self.program is not None:
            self.program.matmul(self.space, plan, x, results)
        return results

    def _plan(self, weights: tuple[Matrix, ...]) -> tuple[Plan, ...]:
        """One plan for each kind of quantized activations among the weights."""
        kinds = dict.fromkeys(w.format.kind for w in weights)
        groups = [tuple(w for w in weights if w.format.kind == kind) for kind in kinds]
        self._plans[weights] = tuple(Plan(group, self.threads) for group in groups)
        return self._plans[weights]

    def batched_matmul(self, x: np.ndarray, weight: Matrix) -> np.ndarray:
        self._not_again()
        heads, rows = weight.tensor.shape[0], weight.tensor.shape[1]
        parts = self._plans.get((weight,))
        if parts is None:
            matrices = [Matrix(weight.tensor.expert(h)) for h in range(heads)]
            parts = self._plans[(weight,)] = tuple(Plan((m,), self.threads) for m in matrices)
        out = np.empty((len(x), heads, rows), np.float32)
        for h, plan in enumerate(parts):
            (out[:, h],) = multiply(self.space, plan, contiguous(x[:, h]))
        return out

    # ---- everything between the products

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        out = elementwise.rms_norm(self.pool, x, weight, eps)
        if self.program is not None:
            self.program.rows(elementwise.norm_address(), x, weight, out, weight.size, eps)
        return out

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x += y
        if self.program is not None:
            self.program.add(x, y)
        return x

    def rope(self, x: np.ndarray, positions: np.ndarray, params: RopeParams,
             norm: tuple[np.ndarray, float] | None = None) -> np.ndarray:
        out = self._rope_tables.rope(self.pool, x, positions, params, norm)
        if self.program is not None:
            table = self._rope_tables.table(params, positions)
            self.program.rope(x, positions, table, params, *(norm or elementwise.NO_NORM))
        return out

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        out = elementwise.swiglu(self.pool, gate, up)
        if self.program is not None:
            self.program.broken |= out.size % 8 != 0
            self.program.rows(elementwise.swiglu_address(), gate, up, out, 8)
        return out

    def _not_again(self) -> None:
        """This operation leaves no line."""
        if self.program is not None:
            self.program.broken = True

    def sigmoid(self, x: np.ndarray) -> np.ndarray:
        self._not_again()
        return 1 / (1 + np.exp(-x))

    def concat(self, *arrays: np.ndarray) -> np.ndarray:
        self._not_again()
        lead = np.broadcast_shapes(*(a.shape[:-1] for a in arrays))
        return np.concatenate([np.broadcast_to(a, lead + a.shape[-1:]) for a in arrays], axis=-1)

    def new_kv_cache(self, n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int,
                     v_size: int, kv_type: str) -> KVCache:
        return KVCache.empty(n_layer, n_seq, n_ctx, n_head_kv, k_size, v_size, kv_type)

    def attention(self, q, k, v, cache: KVCache, layer: int, step: Step, scale: float,
                  window: int = 0, sinks=None, v_size: int = 0) -> np.ndarray:
        out = attention(self.pool, q, k, v, cache, layer, step, scale, window, sinks, v_size)
        if v is None:
            self._not_again()
        elif self.program is not None:
            sinks = NO_SINKS if sinks is None else sinks
            self.program.attention(q, k, v, out, cache, layer, step, scale, window, sinks)
        return out

    # ---- experts

    def route(self, logits: np.ndarray, n_used: int, rule: RouterRule) -> Routing:
        routing = route(logits, n_used, rule)
        if self.program is not None:
            self.program.route(logits, rule, routing)
        return routing

    def moe(self, x: np.ndarray, routing: Routing, experts: LayerExperts,
            addresses: np.ndarray | None = None) -> np.ndarray:
        """addresses int64 [3, E]: where gate, up and down lie, if not in the experts' own bytes."""
        plan = self._layer(experts)
        y = self.moe_space.whole(plan, contiguous(x), routing, addresses)
        if self.program is not None:
            where = plan.addresses if addresses is None else addresses
            self.program.moe(self.moe_space, plan, x, routing, where, y)
        return y

    def moe_begin(self, x: np.ndarray, routing: Routing, experts: LayerExperts) -> MoeStep:
        """Sorts the pairs and quantizes x. Then moe_run, then moe_end, before the next begin."""
        self._not_again()
        step = self.moe_space.begin(self._layer(experts), contiguous(x), routing)
        self.moe_space.run(step, moe.QUANTIZE, _NONE, step.plan.addresses)
        return step

    def _layer(self, experts: LayerExperts) -> LayerPlan:
        plan = self._layers.get(experts)
        if plan is None:
            plan = self._layers[experts] = LayerPlan(experts, self.threads)
        return plan

    def moe_run(self, step: MoeStep, expert_ids: np.ndarray,
                addresses: np.ndarray | None = None) -> None:
        """Computes these experts' pairs. addresses int64 [3, E]: where gate, up and down lie."""
        where = step.plan.addresses if addresses is None else addresses
        self.moe_space.run(step, moe.GATE_UP, np.asarray(expert_ids, np.int32), where)

    def moe_end(self, step: MoeStep) -> np.ndarray:
        """The weighted sum [T, D] over the experts that were run."""
        self.moe_space.run(step, moe.SUM, _NONE, step.plan.addresses)
        return step.y

    def rest(self, resting: bool) -> None:
        """Around a wait for bytes from disk: threads that spin would slow the disk down."""
        self.pool.rest(resting)

    # ---- the rest

    def to_host(self, x: np.ndarray) -> np.ndarray:
        return x

    def close(self) -> None:
        self.pool.close()


_NONE = np.empty(0, np.int32)


def expand(ggml_type, name: str, address: int, out: np.ndarray) -> None:
    """Dequantizes out.size weights at an address into out (contiguous float32)."""
    scratch = np.empty(256, np.uint8)
    function = expand_address(format_of(ggml_type, name))
    expand_weights(function, address, out.size, out.ctypes.data, scratch.ctypes.data)
