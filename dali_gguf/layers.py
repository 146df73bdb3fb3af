"""The parts models are made of. A part is made from weights once and then called with x [T, D].

Everything is written in the operations of dali_gguf/device.py, so it runs wherever they do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.device import Array, Device, RopeParams, Step
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.replay import Replays
from dali_gguf.router import Router, RouterRule
from dali_gguf.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One way through the model: the tokens, where their keys and values lie, who runs experts."""

    step: Step
    cache: Any
    scheduler: Scheduler


class Norm:
    """RMSNorm over the last axis: [T, N] or [T, H, K]."""

    def __init__(self, w: Weights, name: str, size: int, eps: float):
        self.device, self.eps = w.device, eps
        self.weight = w.vector(name, size)

    def __call__(self, x: Array) -> Array:
        return self.device.rms_norm(x, self.weight, self.eps)


class Attention:
    """Grouped-query attention with rotary positions.

    norm: None, "head" (RMSNorm of each query and key head, Qwen3) or "all" (over all heads
    together, OLMoE). Biases and sinks are used where the file has them.
    """

    def __init__(
        self,
        w: Weights,
        c: ModelConfig,
        i: int,
        rope: RopeParams,
        norm: str | None = None,
        window: int = 0,
    ):
        p, n_q, n_k, n_v = (
            f"blk.{i}.attn_",
            c.n_head * c.k_size,
            c.n_head_kv * c.k_size,
            c.n_head_kv * c.v_size,
        )
        self.device, self.config, self.layer, self.rope, self.norm, self.window = (
            w.device,
            c,
            i,
            rope,
            norm,
            window,
        )
        self.qkv = (
            w.matrix(p + "q.weight", n_q, c.n_embd),
            w.matrix(p + "k.weight", n_k, c.n_embd),
            w.matrix(p + "v.weight", n_v, c.n_embd),
        )
        self.biases = tuple(
            w.maybe_vector(f"{p}{x}.bias", n) for x, n in (("q", n_q), ("k", n_k), ("v", n_v))
        )
        self.q_norm = self.k_norm = None
        if norm:
            q_size, k_size = (c.k_size, c.k_size) if norm == "head" else (n_q, n_k)
            self.q_norm = w.vector(p + "q_norm.weight", q_size), c.eps
            self.k_norm = w.vector(p + "k_norm.weight", k_size), c.eps
        self.output = w.matrix(p + "output.weight", c.n_embd, c.n_head * c.v_size)
        self.output_bias = w.maybe_vector(p + "output.bias", c.n_embd)
        self.sinks = w.maybe_vector(p + "sinks.weight", c.n_head)
        self.scale = 1 / math.sqrt(c.k_size)

    def __call__(self, x: Array, run: Pass) -> Array:
        c, device, step, n_token = self.config, self.device, run.step, run.step.size
        q, k, v = device.matmul(x, *self.qkv)
        for y, bias in zip((q, k, v), self.biases):
            plus(device, y, bias)
        q_norm, k_norm = self.q_norm, self.k_norm
        if self.norm == "all":
            q, k = device.rms_norm(q, *q_norm), device.rms_norm(k, *k_norm)
            q_norm = k_norm = None
        q = q.reshape(n_token, c.n_head, c.k_size)
        k = k.reshape(n_token, c.n_head_kv, c.k_size)
        v = v.reshape(n_token, c.n_head_kv, c.v_size)
        q = device.rope(q, step.positions, self.rope, q_norm)
        k = device.rope(k, step.positions, self.rope, k_norm)
        out = device.attention(
            q, k, v, run.cache, self.layer, step, self.scale, self.window, self.sinks
        )
        (y,) = device.matmul(out.reshape(n_token, c.n_head * c.v_size), self.output)
        return plus(device, y, self.output_bias)


def plus(device: Device, x: Array, bias: Array | None) -> Array:
    """Adds a bias in place, if there is one."""
    return x if bias is None else device.add(x, bias)


class FeedForward:
    """down(silu(gate(x)) * up(x)). kind "": a dense layer; "_shexp": a shared expert."""

    def __init__(self, w: Weights, c: ModelConfig, i: int, n_ff: int, kind: str = ""):
        self.device = w.device
        self.gate_up = tuple(
            w.matrix(f"blk.{i}.ffn_{x}{kind}.weight", n_ff, c.n_embd) for x in ("gate", "up")
        )
        self.down = w.matrix(f"blk.{i}.ffn_down{kind}.weight", c.n_embd, n_ff)

    def __call__(self, x: Array, run: Pass) -> Array:
        gate, up = self.device.matmul(x, *self.gate_up)
        return self.device.matmul(self.device.swiglu(gate, up), self.down)[0]


class MoE:
    """Router, chosen experts, and what every token passes through besides (shared), added."""

    def __init__(
        self,
        w: Weights,
        c: ModelConfig,
        i: int,
        rule: RouterRule,
        n_ff: int,
        activation: str = "silu",
        shared=None,
    ):
        self.device, self.layer, self.shared = w.device, i, shared
        self.router = Router(
            w.matrix(f"blk.{i}.ffn_gate_inp.weight", c.experts.n_expert, c.n_embd),
            w.maybe_vector(f"blk.{i}.ffn_gate_inp.bias", c.experts.n_expert),
            c.experts.n_used,
            rule,
        )
        self.experts = w.experts(i, c.experts.n_expert, n_ff, c.n_embd, activation)

    def __call__(self, x: Array, run: Pass) -> Array:
        routing = run.scheduler.route(self.layer, x, self.router)
        y = run.scheduler.moe(self.layer, x, routing)
        return y if self.shared is None else self.device.add(y, self.shared(x, run))


class Layer:
    """x + mixer(norm(x)), then x + feed(norm(x)). The sums are written over x."""

    def __init__(
        self,
        w: Weights,
        c: ModelConfig,
        i: int,
        mixer: Callable,
        feed: Callable,
        norm: str = "ffn_norm",
    ):
        self.device, self.mixer, self.feed = w.device, mixer, feed
        self.mixer_norm = Norm(w, f"blk.{i}.attn_norm.weight", c.n_embd, c.eps)
        self.feed_norm = Norm(w, f"blk.{i}.{norm}.weight", c.n_embd, c.eps)

    def __call__(self, x: Array, run: Pass) -> Array:
        x = self.device.add(x, self.mixer(self.mixer_norm(x), run))
        return self.device.add(x, self.feed(self.feed_norm(x), run))


class Model:
    """Token ids -> logits. experts, routers: by layer number, for the scheduler.

    kv_shape: key heads, size of a key, size of a value in the cache.
    """

    def __init__(
        self, w: Weights, c: ModelConfig, layers: list[Layer], kv_shape: tuple[int, int, int]
    ):
        self.device, self.config, self.layers, self.kv_shape = w.device, c, layers, kv_shape
        embedding = w.get("token_embd.weight", c.n_vocab or None, c.n_embd)
        self.n_vocab = embedding.shape[0]
        self.embedding = w.matrix("token_embd.weight", self.n_vocab, c.n_embd)
        self.norm = Norm(w, "output_norm.weight", c.n_embd, c.eps)
        tied = not w.has("output.weight")
        self.head = self.embedding if tied else w.matrix("output.weight", self.n_vocab, c.n_embd)
        mixtures = {i: layer.feed for i, layer in enumerate(layers) if isinstance(layer.feed, MoE)}
        self.experts = {i: m.experts for i, m in mixtures.items()}
        self.routers = {i: (m.router.weight, m.router.rule) for i, m in mixtures.items()}
        rows = (
            0 if tied else embedding.nbytes - embedding.row_bytes
        )  # of the embedding one row is read
        self._replays = Replays(self.device)
        self.dense_bytes = sum(t.nbytes for t in w.used.values()) - rows

    @property
    def bytes_per_token(self) -> int:
        """Weight bytes that a decode step of one token reads."""
        return self.dense_bytes + self.config.experts.n_used * sum(
            e.expert_bytes() for e in self.experts.values()
        )

    def new_cache(self, n_seq: int, n_ctx: int, kv_type: str) -> Any:
        return self.device.new_kv_cache(self.config.n_layer, n_seq, n_ctx, *self.kv_shape, kv_type)

    def forward(self, run: Pass, rows: slice | None = slice(None)) -> Array | None:
        """Logits [R, n_vocab] of the step's tokens in `rows`; None: only the cache is wanted."""
        with self.device.inference():
            if rows == slice(None) and self._replays.suits(run.step.size, run.scheduler):
                plain = lambda step: self._plain(replace(run, step=step))  # noqa: E731
                return self._replays(run.step, run.cache, run.scheduler, plain)
            return self._plain(run, rows)

    def _plain(self, run: Pass, rows: slice | None = slice(None)) -> Array | None:
        """Operation by operation."""
        x = self.device.embed(run.step.ids, self.embedding)  # [T, D]
        for layer in self.layers:
            x = layer(x, run)
        if rows is None:
            return None
        return self.device.matmul(self.norm(x[rows]), self.head)[0]

    def first_bad_layer(self, run: Pass) -> int | None:
        """The first layer that gives NaN or infinity for the step, or None: the output layer."""
        with self.device.inference():
            x = self.device.embed(run.step.ids, self.embedding)
            for i, layer in enumerate(self.layers):
                x = layer(x, run)
                if not np.isfinite(self.device.to_host(x)).all():
                    return i
        return None
