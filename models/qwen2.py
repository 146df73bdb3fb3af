"""Qwen2 and Qwen2.5, dense: biases on queries, keys and values."""

from dali_gguf.config import ModelConfig
from dali_gguf.layers import Attention, FeedForward, Layer
from dali_gguf.rope import rope_params
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    rope = rope_params(c.rope, interleaved=False)
    return [
        Layer(w, c, i, Attention(w, c, i, rope), FeedForward(w, c, i, c.n_ff))
        for i in range(c.n_layer)
    ]
