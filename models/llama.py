"""Llama, Mistral (dense) and Mixtral (experts): general.architecture = llama."""

from dali_gguf.config import ModelConfig
from dali_gguf.layers import Attention, FeedForward, Layer, MoE
from dali_gguf.rope import rope_params
from dali_gguf.router import RouterRule
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    """rope_freqs.weight holds Llama 3's frequency factors, where a model has them."""
    factors = w.host_vector("rope_freqs.weight", c.rope.n_rot // 2)
    rope = rope_params(c.rope, interleaved=True, freq_factors=factors)
    return [Layer(w, c, i, Attention(w, c, i, rope), feed(w, c, i)) for i in range(c.n_layer)]


def feed(w: Weights, c: ModelConfig, i: int) -> FeedForward | MoE:
    if c.experts.n_expert == 0:
        return FeedForward(w, c, i, c.n_ff)
    return MoE(w, c, i, RouterRule(normalize=True, scale=c.experts.scale), c.experts.n_ff or c.n_ff)
