"""Writes tiny checkpoints as F32 GGUF files, with llama.cpp's names and keys.

Written for the tests alone, independently of the converter.
"""

import re
from pathlib import Path

import gguf
import numpy as np

from tests.tiny_kinds import KINDS, Kind, checkpoint
from tests.vocabulary_file import N_CTX, N_VOCAB, D, write_vocabulary

__all__ = ["KINDS", "N_VOCAB", "Kind", "checkpoint", "write_gguf"]

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHARED = re.compile(r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight")


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
    n_expert = kind.sizes.get(
        "n_routed_experts", kind.sizes.get("num_local_experts", kind.sizes.get("num_experts"))
    )
    if n_expert:
        writer.add_expert_count(n_expert)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if "moe_intermediate_size" in kind.sizes:
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if "shared_expert_intermediate_size" in kind.sizes:
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    for key, value in kind.keys.items():
        types = {
            str: gguf.GGUFValueType.STRING,
            float: gguf.GGUFValueType.FLOAT32,
            bool: gguf.GGUFValueType.BOOL,
        }
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
            top = {
                "model.embed_tokens": "token_embd",
                "model.norm": "output_norm",
                "lm_head": "output",
            }
            out[top[name.removesuffix(".weight")] + ".weight"] = array
    if "rope_parameters" in kind.sizes and kind.sizes["rope_parameters"]["rope_type"] == "llama3":
        out["rope_freqs.weight"] = llama3_factors(kind.sizes["rope_parameters"], D // 4)
    return out


def put_layer(out: dict, kind: Kind, c, p: str, name: str, array: np.ndarray) -> None:
    stem, _, end = name.rpartition(".")
    if name == "post_attention_layernorm.weight":
        out[
            p
            + ("post_attention_norm" if kind.architecture == "gpt-oss" else "ffn_norm")
            + ".weight"
        ] = array
    elif kind.architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        n_head = c.num_attention_heads if ".q_" in name else c.num_key_value_heads
        pairs = array.reshape(n_head, 2, -1, array.shape[1]).swapaxes(
            1, 2
        )  # llama rotates (0,1), (2,3), ..
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
    low, high, old = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    smooth = np.clip((old / length - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)
