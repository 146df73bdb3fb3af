"""The tensors that an architecture must have, with their shapes, from config.json."""

from dali_gguf.convert.model_keys import Config
from dali_gguf.convert.model_tensors import SourceTensor
from dali_gguf.errors import ConvertError

Shapes = dict[str, tuple[int, ...]]


def check_tensors(config: Config, sources: list[SourceTensor]) -> None:
    """Raises ConvertError for a tensor that is missing or has another shape than config.json
    says."""
    found = {s.name: s.shape for s in sources}
    for name, shape in required(config, set(found)).items():
        if name not in found:
            raise ConvertError(
                f"{config.folder}: no tensor for {name} (expected {list(shape)}); the "
                f"checkpoint is not complete"
            )
        if found[name] != shape:
            raise ConvertError(
                f"{config.folder}: the tensor for {name} is {list(found[name])}, config.json "
                f"says {list(shape)}"
            )


def required(config: Config, found: set[str]) -> Shapes:
    """Shapes of all weights; biases and what only some checkpoints have are not listed."""
    d, vocab = config.n_embd, config.count("vocab_size")
    shapes: Shapes = {"token_embd.weight": (vocab, d), "output_norm.weight": (d,)}
    if not config.get("tie_word_embeddings", default=False) or "output.weight" in found:
        shapes["output.weight"] = (vocab, d)
    for i in range(config.n_layer):
        p = f"blk.{i}."
        layer = {"attn_norm.weight": (d,)} | attention(config)
        norm = "post_attention_norm" if config.architecture.name == "gpt-oss" else "ffn_norm"
        layer[norm + ".weight"] = (d,)
        layer |= feed_forward(config, i)
        shapes |= {p + name: shape for name, shape in layer.items()}
    return shapes


def attention(config: Config) -> Shapes:
    d, h, g, k = config.n_embd, config.n_head, config.n_head_kv, config.head_size
    if config.architecture.name == "deepseek2":
        return latent_attention(config)
    shapes: Shapes = {
        "attn_q.weight": (h * k, d), "attn_k.weight": (g * k, d), "attn_v.weight": (g * k, d),
        "attn_output.weight": (d, h * k),
    }  # fmt: skip
    if config.architecture.name in ("qwen3", "qwen3moe"):
        shapes |= {"attn_q_norm.weight": (k,), "attn_k_norm.weight": (k,)}
    if config.architecture.name == "olmoe":
        shapes |= {"attn_q_norm.weight": (h * k,), "attn_k_norm.weight": (g * k,)}
    if config.architecture.name == "gpt-oss":
        shapes["attn_sinks.weight"] = (h,)
    return shapes


def latent_attention(config: Config) -> Shapes:
    d, h, rank = config.n_embd, config.n_head, config.get("kv_lora_rank", default=512)
    nope, rotated = config.count("qk_nope_head_dim"), config.count("qk_rope_head_dim")
    value, q_rank = config.count("v_head_dim"), config.get("q_lora_rank")
    query: Shapes = {"attn_q.weight": (h * (nope + rotated), d)}
    if q_rank is not None:
        query = {
            "attn_q_a.weight": (q_rank, d), "attn_q_a_norm.weight": (q_rank,),
            "attn_q_b.weight": (h * (nope + rotated), q_rank),
        }  # fmt: skip
    return query | {
        "attn_kv_a_mqa.weight": (rank + rotated, d), "attn_kv_a_norm.weight": (rank,),
        "attn_k_b.weight": (h, rank, nope), "attn_v_b.weight": (h, value, rank),
        "attn_output.weight": (d, h * value),
    }  # fmt: skip


def feed_forward(config: Config, layer: int) -> Shapes:
    d, e = config.n_embd, config.n_expert
    if not e or layer < config.get("first_k_dense_replace", default=0):
        f = config.count("intermediate_size")
        return {"ffn_gate.weight": (f, d), "ffn_up.weight": (f, d), "ffn_down.weight": (d, f)}
    f = config.get("moe_intermediate_size", default=config.get("intermediate_size"))
    shapes: Shapes = {
        "ffn_gate_inp.weight": (e, d), "ffn_gate_exps.weight": (e, f, d),
        "ffn_up_exps.weight": (e, f, d),
        "ffn_down_exps.weight": (e, d, f),
    }  # fmt: skip
    shared = config.get("shared_expert_intermediate_size") or f * (
        config.get("n_shared_experts") or 0
    )
    if shared:
        shapes |= {
            "ffn_gate_shexp.weight": (shared, d), "ffn_up_shexp.weight": (shared, d),
            "ffn_down_shexp.weight": (d, shared),
        }  # fmt: skip
    return shapes
