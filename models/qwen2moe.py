"""Qwen1.5-MoE and Qwen2-MoE: a shared expert that every token passes, weighted by its own gate."""

from dali_gguf.config import ModelConfig
from dali_gguf.device import Array
from dali_gguf.layers import Attention, FeedForward, Layer, MoE, Pass
from dali_gguf.rope import rope_params
from dali_gguf.router import RouterRule
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    rope = rope_params(c.rope, interleaved=False)
    rule = RouterRule(normalize=c.experts.norm is True, scale=c.experts.scale)
    n_ff = c.experts.n_ff or c.n_ff // max(1, c.experts.n_used)
    return [
        Layer(
            w, c, i, Attention(w, c, i, rope), MoE(w, c, i, rule, n_ff, shared=GatedShared(w, c, i))
        )
        for i in range(c.n_layer)
    ]


class GatedShared:
    """sigmoid(gate . x) times the shared expert's output, for each token."""

    def __init__(self, w: Weights, c: ModelConfig, i: int):
        self.device = w.device
        self.gate = w.row_matrix(f"blk.{i}.ffn_gate_inp_shexp.weight", c.n_embd)
        self.feed = FeedForward(w, c, i, c.experts.n_ff_shared or c.n_ff, "_shexp")

    def __call__(self, x: Array, run: Pass) -> Array:
        (gate,) = self.device.matmul(x, self.gate)  # [T, 1]
        return self.device.sigmoid(gate) * self.feed(x, run)
