"""The Device protocol in float32 numpy: slow, short, the oracle for every other device.

Weights are dequantized with gguf-py, whole matrices at a time, and kept (tests are small).
Shapes as in dali_gguf/device.py.
"""

from contextlib import nullcontext
from functools import lru_cache

import numpy as np
from gguf import GGMLQuantizationType, quants

from dali_gguf import router
from dali_gguf.device import RopeParams, Step
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor


@lru_cache(maxsize=4096)
def dequantize(tensor: Tensor) -> np.ndarray:
    """float32 values of a tensor, in its shape."""
    rows = tensor.data.reshape(-1, tensor.row_bytes)
    if tensor.type == GGMLQuantizationType.F32:
        return rows.view(np.float32).reshape(tensor.shape)
    return quants.dequantize(rows, tensor.type).astype(np.float32, copy=False).reshape(tensor.shape)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def swiglu_oai(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """gpt-oss: gate clamped from above, up from both sides, and (up + 1) as the second factor."""
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


class NumpyKV:
    """k [L, S, n_ctx, G, K], v [L, S, n_ctx, G, V] for S sequences; v is None if v_size is 0."""

    def __init__(self, n_layer, n_seq, n_ctx, n_head_kv, k_size, v_size, kv_type):
        self.kv_type = kv_type
        shape = (n_layer, n_seq, n_ctx, n_head_kv)
        self.k = np.full((*shape, k_size), np.nan, np.float32)  # reading what was not written shows
        self.v = np.full((*shape, v_size), np.nan, np.float32) if v_size else None

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """x as the cache type would give it back."""
        if self.kv_type == "f16":
            return x.astype(np.float16).astype(np.float32)
        if self.kv_type == "q8_0":
            q8 = GGMLQuantizationType.Q8_0
            return quants.dequantize(quants.quantize(x, q8), q8).reshape(x.shape)
        return x

    def store(self, layer, step: Step, k, v):
        at = (layer, step.sequences, step.positions)
        self.k[at] = self.rounded(k)
        if self.v is not None:
            self.v[at] = self.rounded(v)


class NumpyDevice:
    name = "numpy"

    def weight(self, tensor):
        return tensor

    def vector(self, tensor):
        return dequantize(tensor)

    def embed(self, ids, table):
        return dequantize(table)[ids]

    def add(self, x, y):
        x += y
        return x

    def inference(self):
        return nullcontext()

    def start_recording(self, step):
        return None

    def stop_recording(self): ...

    def rms_norm(self, x, weight, eps):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight

    def matmul(self, x, *weights):
        return tuple(x @ dequantize(w).T for w in weights)

    def batched_matmul(self, x, weight):
        return np.einsum("thn,hmn->thm", x, dequantize(weight), optimize=True)

    def rope(self, x, positions, params: RopeParams, norm=None):
        x = x if norm is None else self.rms_norm(x, *norm)
        n, out = params.n_rot, np.array(x, np.float32)
        angle = positions[:, None, None] * params.inv_freq  # [T, 1, n/2]
        cos, sin = np.cos(angle) * params.magnitude, np.sin(angle) * params.magnitude
        first, second = (
            (slice(0, n, 2), slice(1, n, 2))
            if params.interleaved
            else (slice(0, n // 2), slice(n // 2, n))
        )
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def concat(self, *arrays):
        lead = np.broadcast_shapes(*(a.shape[:-1] for a in arrays))
        return np.concatenate([np.broadcast_to(a, (*lead, a.shape[-1])) for a in arrays], axis=-1)

    def new_kv_cache(self, n_layer, n_seq, n_ctx, n_head_kv, k_size, v_size, kv_type):
        return NumpyKV(n_layer, n_seq, n_ctx, n_head_kv, k_size, v_size, kv_type)

    def attention(self, q, k, v, cache, layer, step, scale, window=0, sinks=None, v_size=0):
        cache.store(layer, step, k, v)
        group = q.shape[1] // k.shape[1]
        out = []
        for t in range(step.size):
            end = int(step.positions[t]) + 1
            start = max(0, end - window) if window else 0
            seen = cache.k[layer, step.sequences[t], start:end]  # [S, G, K]
            values = (
                seen[..., :v_size] if v is None else cache.v[layer, step.sequences[t], start:end]
            )
            scores = np.einsum("hk,shk->hs", q[t], np.repeat(seen, group, axis=1)) * np.float32(
                scale
            )
            if sinks is not None:
                scores = np.concatenate([scores, sinks[:, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights = (weights / weights.sum(axis=1, keepdims=True))[:, : end - start]
            out.append(np.einsum("hs,shv->hv", weights, np.repeat(values, group, axis=1)))
        return np.stack(out).astype(np.float32)

    def swiglu(self, gate, up):
        return silu(gate) * up

    def sigmoid(self, x):
        return 1 / (1 + np.exp(-x))

    def route(self, logits, n_used, rule) -> Routing:
        return router.route(logits, n_used, rule)

    def moe(self, x, routing: Routing, experts: LayerExperts):
        out = np.zeros_like(x)
        for e in np.flatnonzero(routing.workload):
            t, slot = np.nonzero(routing.expert_ids == e)
            out[t] += routing.weights[t, slot, None] * self.expert(x[t], experts, e)
        return out

    def expert(self, x, experts: LayerExperts, e):
        """Expert e on x [T, D]: [T, D]."""
        gate, up, down = experts.matrices(e)
        g, u = self.matmul(x, gate, up)
        if experts.gate_bias is not None:
            g, u = g + experts.gate_bias[e], u + experts.up_bias[e]
        h = swiglu_oai(g, u) if experts.activation == "swiglu_oai" else silu(g) * u
        (y,) = self.matmul(h, down)
        return y if experts.down_bias is None else y + experts.down_bias[e]

    def to_host(self, x):
        return np.asarray(x, np.float32)

    def close(self):
        pass
