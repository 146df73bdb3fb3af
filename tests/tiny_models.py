"""Tiny random checkpoints of every architecture (transformers), written as F32 GGUF files.

The names and keys are llama.cpp's. Written for the tests alone, independently of the converter.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

torch.set_num_threads(1)  # tiny products wait for each other longer than they compute

BYTES = [f"<0x{i:02X}>" for i in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *(f"\u2581w{i}" for i in range(29))]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 29]
N_VOCAB, N_CTX, D = len(TOKENS), 256, 64
SIZES = {
    "vocab_size": N_VOCAB, "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": N_CTX, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 16, **MOE,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


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
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, "tie_word_embeddings": True},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "mixtral": Kind("llama", "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral-single": Kind("llama", "Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}, experts="single"),
    "qwen2": Kind("qwen2", "Qwen2"),
    "qwen2-yarn": Kind(
        "qwen2",
        "Qwen2",
        {"rope_parameters": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3": Kind("qwen3", "Qwen3", {"head_dim": 32}),
    "qwen2moe": Kind("qwen2moe", "Qwen2Moe", {"num_experts": 8, "shared_expert_intermediate_size": 64, **MOE}),
    "qwen3moe": Kind("qwen3moe", "Qwen3Moe", {"num_local_experts": 8, "head_dim": 32, "norm_topk_prob": True, **MOE}),
    "qwen3moe-fused": Kind(
        "qwen3moe", "Qwen3Moe", {"num_local_experts": 8, "head_dim": 32, "norm_topk_prob": True, **MOE}, experts="fused"
    ),
    "olmoe": Kind("olmoe", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "deepseek2-lite": Kind("deepseek2", "DeepseekV2", {**MLA, "q_lora_rank": None}),
    "deepseek2-lite-old": Kind("deepseek2", "DeepseekV2", {**MLA, "q_lora_rank": None}, kv_b=True),
    "deepseek2-groups": Kind(
        "deepseek2",
        "DeepseekV2",
        {
            **MLA, "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.5, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
    ),
    "deepseek3": Kind(
        "deepseek2",
        "DeepseekV3",
        {
            **MLA, "q_lora_rank": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5,
            "expert_weights_norm": True, "expert_gating_func": 2,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
    ),
    "gpt-oss": Kind(
        "gpt-oss",
        "GptOss",
        {
            "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64, "head_dim": 32,
            "sliding_window": 16, "num_hidden_layers": 4, "rope_parameters": {**YARN, "truncate": True},
        },
        {
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
            "attention.sliding_window": 16,
        },
    ),
}  # fmt: skip

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
SHARED = re.compile(r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight")


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


def write_gguf(path: Path, kind: Kind, model) -> Path:
    writer = gguf.GGUFWriter(path, kind.architecture)
    write_keys(writer, kind, model.config)
    for name, array in tensors(kind, model).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(N_VOCAB)])
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_keys(writer: gguf.GGUFWriter, kind: Kind, c) -> None:
    write_vocabulary(writer)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(D)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if kind.architecture == "deepseek2":
        write_latent_keys(writer, kind, c)
    else:
        writer.add_head_count_kv(c.num_key_value_heads)
        head = kind.sizes.get("head_dim", D // c.num_attention_heads)
        writer.add_key_length(head)
        writer.add_value_length(head)
    n_expert = kind.sizes.get("n_routed_experts", kind.sizes.get("num_local_experts", kind.sizes.get("num_experts")))
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if "moe_intermediate_size" in kind.sizes:
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if "shared_expert_intermediate_size" in kind.sizes:
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    for key, value in kind.keys.items():
        types = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, bool: gguf.GGUFValueType.BOOL}
        full = f"{kind.architecture}.{key}"
        writer.add_key_value(full, value, types.get(type(value), gguf.GGUFValueType.UINT32))


def write_latent_keys(writer: gguf.GGUFWriter, kind: Kind, c) -> None:
    k_size = c.qk_nope_head_dim + c.qk_rope_head_dim
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_shared_count(c.n_shared_experts)
    if c.q_lora_rank:
        writer.add_q_lora_rank(c.q_lora_rank)
    if kind.kv_b:
        writer.add_head_count_kv(c.num_attention_heads)
        writer.add_key_length(k_size)
        writer.add_value_length(c.v_head_dim)
        return
    writer.add_head_count_kv(1)
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(k_size)
    writer.add_value_length_mla(c.v_head_dim)


def tensors(kind: Kind, model) -> dict[str, np.ndarray]:
    out = {}
    for name, value in model.state_dict().items():
        array = value.float().numpy()
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if layer:
            put_layer(out, kind, model.config, f"blk.{layer[1]}.", layer[2], array)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            out[top[name.removesuffix(".weight")] + ".weight"] = array
    if "rope_parameters" in kind.sizes and kind.sizes["rope_parameters"]["rope_type"] == "llama3":
        out["rope_freqs.weight"] = llama3_factors(kind.sizes["rope_parameters"], D // 4)
    return out


def put_layer(out: dict, kind: Kind, c, p: str, name: str, array: np.ndarray) -> None:
    stem, _, end = name.rpartition(".")
    if name == "post_attention_layernorm.weight":
        out[p + ("post_attention_norm" if kind.architecture == "gpt-oss" else "ffn_norm") + ".weight"] = array
    elif kind.architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        n_head = c.num_attention_heads if ".q_" in name else c.num_key_value_heads
        pairs = array.reshape(n_head, 2, -1, array.shape[1]).swapaxes(1, 2)  # llama rotates (0,1), (2,3), ..
        out[p + NAMES[stem] + ".weight"] = pairs.reshape(array.shape)
    elif stem in NAMES and end in ("weight", "bias"):
        out[p + NAMES[stem] + "." + end] = array
    elif SHARED.match(name):
        out[p + f"ffn_{SHARED.match(name)[1]}_shexp.weight"] = array
    elif name == "mlp.shared_expert_gate.weight":
        out[p + "ffn_gate_inp_shexp.weight"] = array[0]
    elif name == "self_attn.sinks":
        out[p + "attn_sinks.weight"] = array
    elif name.endswith("e_score_correction_bias"):
        out[p + "exp_probs_b.bias"] = array
    elif name == "self_attn.kv_b_proj.weight":
        put_kv_b(out, kind, c, p, array)
    else:
        put_experts(out, kind, p, name, array)


def put_kv_b(out: dict, kind: Kind, c, p: str, array: np.ndarray) -> None:
    if kind.kv_b:
        out[p + "attn_kv_b.weight"] = array
        return
    heads = array.reshape(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
    out[p + "attn_k_b.weight"] = heads[:, : c.qk_nope_head_dim].transpose(0, 2, 1)
    out[p + "attn_v_b.weight"] = heads[:, c.qk_nope_head_dim :]


def put_experts(out: dict, kind: Kind, p: str, name: str, array: np.ndarray) -> None:
    """transformers: gate_up_proj [E, 2F, D] (gpt-oss [E, D, 2F], interleaved), down_proj."""
    end = ".bias" if name.endswith("_bias") else ".weight"
    gpt_oss = kind.architecture == "gpt-oss"
    if gpt_oss and end == ".weight":
        array = array.transpose(0, 2, 1)
    if "down_proj" in name:
        parts = {"down": array}
    elif gpt_oss:
        parts = {"gate": array[:, ::2], "up": array[:, 1::2]}
    else:
        half = array.shape[1] // 2
        parts = {"gate": array[:, :half], "up": array[:, half:]}
    if kind.experts == "fused" and "gate" in parts:
        out[p + "ffn_gate_up_exps" + end] = array
        return
    for role, stack in parts.items():
        if kind.experts == "single":
            out.update({f"{p}ffn_{role}.{e}{end}": matrix for e, matrix in enumerate(stack)})
        else:
            out[f"{p}ffn_{role}_exps{end}"] = stack


def llama3_factors(rope: dict, n_rot: int) -> np.ndarray:
    """What the frequencies are divided by (Llama 3.1's scaling)."""
    inv_freq = rope["rope_theta"] ** (-np.arange(0, n_rot, 2) / n_rot)
    length = 2 * np.pi / inv_freq
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = np.clip((old / length - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
