"""The array operations a model is written in. kernels/cpu.py and offload/torch_device.py provide
them.

Shapes: T tokens of the step, D n_embd, H heads, G key/value heads, K key size, V value size,
E experts, A experts used per token, F n_ff_exp. Arrays are float32, and belong to the device
(numpy for the CPU, torch tensors for a GPU); +, *, reshape and slicing work on both. Arguments may
be views that are not contiguous.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.routing import LayerExperts, Routing
from dali_gguf.tensor import Tensor

Array = Any
MOST_THREADS = 512  # as in ggml; a system gives out some thousands and then fails


def check_threads(threads: int) -> None:
    """InputError for more than a CPU device takes."""
    if threads > MOST_THREADS:
        raise InputError(f"{threads} threads: expected at most {MOST_THREADS}")


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The tokens one pass through the model works on.

    ids, positions, sequences: int32 [T]. Prefill: one sequence, consecutive positions. Batched
    decode: one token of each sequence. Tokens of a sequence stand together, positions ascending.
    """

    ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray

    @property
    def size(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Rotary embedding of one model. n_rot dimensions are rotated, the rest passes through.

    interleaved: pairs (0,1),(2,3).. (llama); else (i, i + n_rot/2) (neox). inv_freq float32
    [n_rot/2] already holds every scaling (linear, YaRN, llama3, rope_freqs); magnitude multiplies
    sin and cos (YaRN's attention factor).
    """

    n_rot: int
    interleaved: bool
    inv_freq: np.ndarray
    magnitude: float = 1.0


class Device(Protocol):
    name: str

    def weight(self, tensor: Tensor) -> Any:
        """A handle that this device's matmul, embed and rms_norm take (a CPU returns the
        Tensor)."""

    def inference(self) -> AbstractContextManager:
        """Around every step: nothing that is needed for training is kept."""

    def vector(self, tensor: Tensor) -> Array:
        """A small tensor (norm, bias, sinks) dequantized to float32 in its own shape."""

    def embed(self, ids: np.ndarray, table: Any) -> Array:
        """Rows ids int32 [T] of table [n_vocab, D], dequantized: [T, D]."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis; x [.., N], weight [N]."""

    def add(self, x: Array, y: Array) -> Array:
        """x += y, and x. y [N] is added to every row of x [T, N]."""

    def matmul(self, x: Array, *weights: Any) -> tuple[Array, ...]:
        """x [T, N] times each weight [M, N] transposed: a tuple of [T, M]. One launch for all."""

    def batched_matmul(self, x: Array, weight: Any) -> Array:
        """x [T, H, N], weight [H, M, N]: out[t, h] = weight[h] @ x[t, h], [T, H, M] (MLA)."""

    def rope(self, x: Array, positions: np.ndarray, params: RopeParams,
             norm: tuple[Array, float] | None = None) -> Array:
        """Rotates the first n_rot of the last axis of x [T, H, K] (in place where it can). norm:
        (weight, eps) of an rms_norm of each head before that."""

    def concat(self, *arrays: Array) -> Array:
        """Joined along the last axis; the leading axes broadcast ([T, 1, R] fits [T, H, N])."""

    def new_kv_cache(self, n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int,
                     v_size: int, kv_type: str) -> Any:
        """An empty cache. kv_type: f16, q8_0 or f32. v_size 0: values are the first columns of
        the keys (MLA's compressed cache)."""

    def attention(self, q: Array, k: Array, v: Array | None, cache: Any, layer: int, step: Step,
                  scale: float, window: int = 0, sinks: Array | None = None,
                  v_size: int = 0) -> Array:
        """Stores k [T, G, K] and v [T, G, V] at the step's positions, then causal attention of
        q [T, H, K]: [T, H, V]. window > 0: only the last `window` positions are seen. sinks [H]:
        one extra logit a head that takes part in the softmax only. v None: V = v_size columns of
        k."""

    def swiglu(self, gate: Array, up: Array) -> Array:
        """silu(gate) * up, [T, F]."""

    def sigmoid(self, x: Array) -> Array:
        """1 / (1 + exp(-x))."""

    def route(self, logits: Array, n_used: int, rule: Any) -> Routing:
        """router.RouterRule applied to logits [T, E]; the result lies in host memory."""

    def moe(self, x: Array, routing: Routing, experts: LayerExperts) -> Array:
        """Sum over a token's experts of weight * down(act(gate(x), up(x))): [T, D]."""

    def start_recording(self, step: Step) -> Any | None:
        """Writes down the operations until stop_recording, for steps of as many tokens: a program
        with `step` (to be used for this pass), `finish(out)`, `broken`, `run(step)`. None: not
        on this device, or not yet."""

    def stop_recording(self) -> None: ...

    def to_host(self, x: Array) -> np.ndarray:
        """float32 numpy array of x."""

    def close(self) -> None: ...
