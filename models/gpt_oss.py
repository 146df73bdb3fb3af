"""gpt-oss (20b, 120b): every other layer sees a window, heads have sinks, everything has a bias."""

from dali_gguf.config import ModelConfig
from dali_gguf.layers import Attention, Layer, MoE
from dali_gguf.rope import rope_params
from dali_gguf.router import RouterRule
from dali_gguf.weights import Weights


def layers(w: Weights, c: ModelConfig) -> list[Layer]:
    """Even layers see the last c.window positions, odd layers all of them."""
    rope = rope_params(c.rope, interleaved=False)
    rule = RouterRule(scoring="softmax_after", scale=c.experts.scale)
    n_ff = c.experts.n_ff or c.n_ff
    return [
        Layer(
            w,
            c,
            i,
            Attention(w, c, i, rope, window=c.window if i % 2 == 0 else 0),
            MoE(w, c, i, rule, n_ff, activation="swiglu_oai"),
            norm="post_attention_norm",
        )
        for i in range(c.n_layer)
    ]
