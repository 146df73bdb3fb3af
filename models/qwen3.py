"""Qwen3, dense: each query and key head is normalised before it is rotated."""

from dali_gguf.config import ModelConfig
from dali_gguf.layers import Attention, FeedForward, Layer
from dali_gguf.rope import rope_params
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    rope = rope_params(c.rope, interleaved=False)
    return [
        Layer(w, c, i, Attention(w, c, i, rope, norm="head"), FeedForward(w, c, i, c.n_ff))
        for i in range(c.n_layer)
    ]
