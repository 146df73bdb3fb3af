"""Tiny random checkpoints of every architecture (transformers)."""

from dataclasses import dataclass, field

import torch
import transformers

from tests.vocabulary_file import N_CTX, N_VOCAB, D

torch.set_num_threads(1)  # tiny products wait for each other longer than they compute

SIZES = {
    "vocab_size": N_VOCAB,
    "hidden_size": D,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": N_CTX,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "head_dim": 16,
    **MOE,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 32,
}
GROUP_KEYS = {
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_scale": 2.5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Kind:
    """One row of the test: transformers' class, its sizes, and how the file is written.

    experts: merged, single (a tensor an expert) or fused (gate and up in one). kv_b: DeepSeek's
    old form. keys: GGUF keys beyond the common ones.
    """

    architecture: str
    hf: str
    sizes: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    experts: str = "merged"
    kv_b: bool = False


KINDS = {
    "llama": Kind("llama", "Llama"),
    "llama3-rope": Kind("llama", "Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": Kind(
        "llama",
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "tie_word_embeddings": True,
        },
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mixtral": Kind("llama", "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-single": Kind(
        "llama", "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, experts="single"
    ),
    "qwen2": Kind("qwen2", "Qwen2"),
    "qwen2-yarn": Kind(
        "qwen2",
        "Qwen2",
        {"rope_parameters": YARN},
        YARN_KEYS,
    ),
    "qwen3": Kind("qwen3", "Qwen3", {"head_dim": 32}),
    "qwen2moe": Kind(
        "qwen2moe", "Qwen2Moe", {"num_experts": 8, "shared_expert_intermediate_size": 64, **MOE}
    ),
    "qwen3moe": Kind(
        "qwen3moe",
        "Qwen3Moe",
        {"num_local_experts": 8, "head_dim": 32, "norm_topk_prob": True, **MOE},
    ),
    "qwen3moe-fused": Kind(
        "qwen3moe",
        "Qwen3Moe",
        {"num_local_experts": 8, "head_dim": 32, "norm_topk_prob": True, **MOE},
        experts="fused",
    ),
    "olmoe": Kind("olmoe", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek2-lite": Kind("deepseek2", "DeepseekV2", {**MLA, "q_lora_rank": None}),
    "deepseek2-lite-old": Kind("deepseek2", "DeepseekV2", {**MLA, "q_lora_rank": None}, kv_b=True),
    "deepseek2-groups": Kind(
        "deepseek2",
        "DeepseekV2",
        {
            **MLA,
            "q_lora_rank": 32,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **GROUP_KEYS,
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "deepseek3": Kind(
        "deepseek2",
        "DeepseekV3",
        {
            **MLA,
            "q_lora_rank": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            **GROUP_KEYS,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            **YARN_KEYS,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "gpt-oss": Kind(
        "gpt-oss",
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "head_dim": 32,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "rope_parameters": {**YARN, "truncate": True},
        },
        {
            **YARN_KEYS,
            "attention.sliding_window": 16,
        },
    ),
}


def checkpoint(kind: Kind, seed: int = 0):
    """A model with weights large enough that attention and routing decide something."""
    config = getattr(transformers, kind.hf + "Config")(**{**SIZES, **kind.sizes})
    config._attn_implementation = "eager"
    model = getattr(transformers, kind.hf + "ForCausalLM")(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.state_dict().items():
        noise = torch.randn(p.shape, generator=generator)
        if "norm" in name:
            p.copy_(1 + 0.2 * noise)
        elif p.ndim == 1 or "bias" in name:
            p.copy_(0.1 * noise)
        else:
            p.copy_(noise * 1.5 / p.shape[-1] ** 0.5)
    return model
