"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention, experts without a shared one."""

from dali_gguf.config import ModelConfig
from dali_gguf.layers import Attention, Layer, MoE
from dali_gguf.rope import rope_params
from dali_gguf.router import RouterRule
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    rope = rope_params(c.rope, interleaved=False)
    rule = RouterRule(normalize=c.experts.norm is not False, scale=c.experts.scale)
    n_ff = c.experts.n_ff or c.n_ff // max(1, c.experts.n_used)
    return [
        Layer(w, c, i, Attention(w, c, i, rope, norm="head"), MoE(w, c, i, rule, n_ff))
        for i in range(c.n_layer)
    ]
