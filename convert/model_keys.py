"""config.json to GGUF keys, by llama.cpp's names.

The raw config is read, not transformers' object: that one drops keys it does not know (scoring_func
and others). What a config leaves out gets the default of the model's transformers class.
"""

from dataclasses import dataclass, field

from dali_gguf.convert.gguf_output import Value, boolean, f32, string, u32
from dali_gguf.errors import ConvertError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
GATING = {"softmax": 1, "sigmoid": 2}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a transformers class becomes a GGUF architecture.

    defaults: what its config class sets where config.json is silent. permuted: rows of q and k are
    reordered from transformers' half-split rotation to adjacent pairs. moe: experts are required.
    head_dim: its config class derives a head size, which the file then states.
    """

    name: str
    defaults: dict = field(default_factory=dict)
    permuted: bool = False
    moe: bool = False
    head_dim: bool = False
    spm: bool = False


LLAMA = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
QWEN = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
DEEPSEEK = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "first_k_dense_replace": 0}
GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", LLAMA, permuted=True, head_dim=True, spm=True),
    "LLaMAForCausalLM": Architecture("llama", LLAMA, permuted=True, head_dim=True, spm=True),
    "MistralForCausalLM": Architecture("llama", LLAMA, permuted=True, head_dim=True, spm=True),
    "MixtralForCausalLM": Architecture(
        "llama", {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6,
                  "num_key_value_heads": 8, "num_experts_per_tok": 2},
        permuted=True, moe=True, spm=True,
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", QWEN, spm=True),
    "Qwen3ForCausalLM": Architecture("qwen3", {**QWEN, "head_dim": 128}, spm=True),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2moe", {**QWEN, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                     "shared_expert_intermediate_size": 5632}, moe=True,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3moe", {**QWEN, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "head_dim": 128}, moe=True,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe", {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "num_experts_per_tok": 8}, moe=True
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek2", {**DEEPSEEK, "routed_scaling_factor": 1.0}, moe=True
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek2", {**DEEPSEEK, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
                      "norm_topk_prob": True, "scoring_func": "sigmoid",
                      "first_k_dense_replace": 3}, moe=True,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt-oss", {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 150000.0,
                    "rope_parameters": GPT_OSS_ROPE, "head_dim": 64, "sliding_window": 128,
                    "num_experts_per_tok": 4}, moe=True,
    ),
}  # fmt: skip


def find_architecture(config: dict, folder: object) -> tuple[str, Architecture]:
    """(transformers' class, Architecture). Raises ConvertError with the list of what is known."""
    names = config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    found = (
        ", ".join(map(str, names))
        or f"model_type {config.get('model_type')!r} and no architectures"
    )
    raise ConvertError(f"{folder}: {found}; this version converts {', '.join(ARCHITECTURES)}")


@dataclass(frozen=True, slots=True)
class Config:
    """The values of a config.json, with the defaults of the architecture behind them."""

    values: dict
    architecture: Architecture
    folder: str

    def get(self, *names: str, default=None):
        """The first value that is not null under any of the names."""
        for source in (self.values, self.architecture.defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return default

    def need(self, *names: str):
        value = self.get(*names)
        if value is None:
            known = " or ".join(names)
            raise ConvertError(f"{self.folder}/config.json: {known} is missing; expected a number")
        return value

    def count(self, *names: str) -> int:
        value = self.need(*names)
        if type(value) is not int or value < 1:
            raise ConvertError(
                f"{self.folder}/config.json: {names[0]} is {value!r}; expected a positive integer"
            )
        return value

    @property
    def n_head(self) -> int:
        return self.count("num_attention_heads", "n_head", "n_heads")

    @property
    def n_head_kv(self) -> int:
        return self.get("num_key_value_heads", "n_kv_heads", default=self.n_head)

    @property
    def n_embd(self) -> int:
        return self.count("hidden_size", "n_embd", "dim")

    @property
    def n_layer(self) -> int:
        return self.count("num_hidden_layers", "n_layers", "n_layer", "num_layers")

    @property
    def n_expert(self) -> int:
        """0 for a dense architecture; missing in a MoE one is an error."""
        if not self.architecture.moe:
            return 0
        return self.count(*EXPERTS)

    @property
    def head_size(self) -> int:
        return self.get("head_dim", default=self.n_embd // self.n_head)

    @property
    def rope(self) -> dict:
        """rope_parameters (transformers 5) or rope_scaling with rope_theta beside it, made one."""
        rope = dict(self.get("rope_parameters", "rope_scaling", default={}))
        rope = rope.get("full_attention", rope)
        if rope.get("rope_theta") is None:
            rope["rope_theta"] = self.get("rope_theta", default=10000.0)
        if rope.get("rope_type") is None:
            rope["rope_type"] = rope.get("type", "default")
        if rope.get("original_max_position_embeddings") is None:
            fallback = self.get("original_max_position_embeddings", "max_position_embeddings")
            rope["original_max_position_embeddings"] = fallback
        return rope


def model_keys(config: Config) -> dict[str, Value]:
    """All keys under the architecture's name."""
    keys = _common_keys(config) | _rope_keys(config) | _expert_keys(config)
    name = config.architecture.name
    if name == "llama":
        keys["vocab_size"] = u32(config.count("vocab_size"))
        keys["rope.dimension_count"] = u32(config.head_size)
    elif name == "qwen2moe":
        keys["expert_shared_feed_forward_length"] = u32(
            config.count("shared_expert_intermediate_size")
        )
    elif name == "deepseek2":
        keys |= _latent_keys(config)
    elif name == "gpt-oss":
        keys["attention.sliding_window"] = u32(config.count("sliding_window"))
    return {f"{name}.{key}": value for key, value in keys.items()}


def _common_keys(config: Config) -> dict[str, Value]:
    latent = config.architecture.name == "deepseek2"
    keys = {
        "block_count": u32(config.n_layer),
        "context_length": u32(config.count("max_position_embeddings", "n_ctx", "n_positions")),
        "embedding_length": u32(config.n_embd),
        "feed_forward_length": u32(config.count("intermediate_size", "n_inner")),
        "attention.head_count": u32(config.n_head),
        "attention.head_count_kv": u32(1 if latent else config.n_head_kv),
        "attention.layer_norm_rms_epsilon": f32(config.need("rms_norm_eps", "norm_eps")),
    }
    if not latent and (config.architecture.head_dim or config.get("head_dim") is not None):
        keys["attention.key_length"] = keys["attention.value_length"] = u32(config.head_size)
    return keys


def _rope_keys(config: Config) -> dict[str, Value]:
    rope, kind = config.rope, str(config.rope["rope_type"]).lower()
    keys = {"rope.freq_base": f32(rope["rope_theta"])}
    if kind in ("linear", "yarn") and rope.get("factor") is not None:
        keys["rope.scaling.type"] = string(kind)
        keys["rope.scaling.factor"] = f32(rope["factor"])
    elif kind not in ("default", "none", "llama3", "linear", "yarn"):
        raise ConvertError(
            f"{config.folder}/config.json: rope_type {kind!r}; expected default, linear, yarn "
            f"or llama3"
        )
    if kind == "yarn" and rope.get("factor") is not None:
        keys["rope.scaling.original_context_length"] = u32(
            int(rope["original_max_position_embeddings"])
        )
        for name, key in (
            ("extrapolation_factor", "yarn_ext_factor"), ("attention_factor", "attn_factor"),
            ("attn_factor", "attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow",
            "yarn_beta_slow"),
        ):  # fmt: skip
            if rope.get(name) is not None:
                keys.setdefault(f"rope.scaling.{key}", f32(rope[name]))
    return keys


def _expert_keys(config: Config) -> dict[str, Value]:
    if not config.n_expert:
        return {}
    keys = {"expert_count": u32(config.n_expert), "expert_used_count": u32(config.count(*USED))}
    for name, key in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")):
        if config.get(name) is not None:
            keys[key] = u32(config.get(name))
    scoring = config.get("scoring_func", "score_function", "score_func")
    if scoring is not None:
        if scoring not in GATING:
            raise ConvertError(
                f"{config.folder}/config.json: scoring_func {scoring!r}; expected softmax or "
                f"sigmoid"
            )
        keys["expert_gating_func"] = u32(GATING[scoring])
    size = config.get("moe_intermediate_size")
    if config.architecture.name == "gpt-oss":
        size = config.count("intermediate_size")
    if size is not None:
        keys["expert_feed_forward_length"] = u32(size)
    return keys


def _latent_keys(config: Config) -> dict[str, Value]:
    """DeepSeek's compressed attention, written as attention with one key/value head."""
    rank, rotated = config.get("kv_lora_rank", default=512), config.count("qk_rope_head_dim")
    keys = {
        "leading_dense_block_count": u32(config.get("first_k_dense_replace", default=0)),
        "vocab_size": u32(config.count("vocab_size")),
        "attention.kv_lora_rank": u32(rank),
        "attention.key_length": u32(rank + rotated),
        "attention.value_length": u32(rank),
        "attention.key_length_mla": u32(config.count("qk_nope_head_dim") + rotated),
        "attention.value_length_mla": u32(config.count("v_head_dim")),
        "expert_shared_count": u32(config.get("n_shared_experts", default=0)),
        "expert_weights_scale": f32(config.get("routed_scaling_factor", default=1.0)),
        "rope.dimension_count": u32(rotated),
    }
    if config.get("q_lora_rank") is not None:
        keys["attention.q_lora_rank"] = u32(config.get("q_lora_rank"))
    if config.get("norm_topk_prob"):
        keys["expert_weights_norm"] = boolean(True)
    if config.rope.get("mscale_all_dim") is not None:
        keys["rope.scaling.yarn_log_multiplier"] = f32(0.1 * config.rope["mscale_all_dim"])
    return keys
