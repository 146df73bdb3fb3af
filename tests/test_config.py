"""Keys that are missing, of the wrong type, or impossible are named."""

import numpy as np
import pytest

from dali_gguf.config import ModelConfig
from dali_gguf.errors import ModelFileError

GOOD = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 2,
    "qwen3moe.context_length": 512,
    "qwen3moe.embedding_length": 64,
    "qwen3moe.attention.head_count": 4,
    "qwen3moe.attention.head_count_kv": 2,
    "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3moe.expert_count": 8,
    "qwen3moe.expert_used_count": 2,
    "tokenizer.ggml.tokens": ["a", "b"],
}


def test_defaults():
    c = ModelConfig.from_metadata(GOOD)
    assert (c.k_size, c.v_size, c.n_head_kv, c.n_vocab, c.rope.n_rot) == (16, 16, 2, 2, 16)
    assert (c.rope.base, c.rope.scaling, c.experts.n_expert, c.experts.n_used, c.experts.norm) == (
        1e4,
        "none",
        8,
        2,
        None,
    )


def test_an_array_of_equal_values_counts_as_one():
    c = ModelConfig.from_metadata(
        {**GOOD, "qwen3moe.feed_forward_length": np.array([96, 96], np.int32)}
    )
    assert c.n_ff == 96


def test_a_factor_of_0_stands_for_none():
    c = ModelConfig.from_metadata(
        {**GOOD, "qwen3moe.rope.scaling.factor": 0.0, "qwen3moe.expert_weights_scale": 0.0}
    )
    assert (c.rope.factor, c.rope.scaling, c.experts.scale) == (1.0, "none", 1.0)


def test_layers_that_predict_further_tokens_are_not_counted():
    assert ModelConfig.from_metadata({**GOOD, "qwen3moe.nextn_predict_layers": 1}).n_layer == 1


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("general.architecture", 3, "a text"),
        ("block_count", None, "is missing"),
        ("block_count", 0, "from 1"),
        ("block_count", "2", "is '2'"),
        ("block_count", True, "is True"),
        ("block_count", 2**40, "whole number"),
        ("embedding_length", np.array([1, 2]), "an array of 2"),
        ("attention.head_count", 2**31, "whole number"),
        ("attention.head_count_kv", 3, "divisor of head_count"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "above 0"),
        ("attention.layer_norm_rms_epsilon", None, "is missing"),
        ("rope.dimension_count", 7, "even number"),
        ("rope.dimension_count", 18, "up to the head size"),
        ("rope.freq_base", 1.0, "above 1"),
        ("rope.freq_base", -5.0, "above 0"),
        ("rope.scaling.type", "longrope", "supported are none, linear, yarn"),
        ("expert_used_count", None, "is missing"),
        ("expert_used_count", 0, "from 1"),
        ("expert_used_count", 9, "at most expert_count (8)"),
        ("expert_group_count", 3, "divisor of expert_count"),
        ("expert_gating_func", 9, "1 (softmax)"),
        ("expert_weights_norm", 1, "true or false"),
        ("nextn_predict_layers", 2, "fewer than block_count"),
        ("tokenizer.ggml.tokens", 5, "array of texts"),
    ],
)
def test_a_wrong_key_is_named(key, value, expected):
    full = key if key.startswith(("general.", "tokenizer.")) else f"qwen3moe.{key}"
    changed = {k: v for k, v in {**GOOD, full: value}.items() if v is not None}
    with pytest.raises(ModelFileError) as caught:
        ModelConfig.from_metadata(changed, "m.gguf")
    assert (
        expected in str(caught.value)
        and full in str(caught.value)
        and str(caught.value).startswith("m.gguf: ")
    )
