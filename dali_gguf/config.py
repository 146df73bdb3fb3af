"""The sizes of a model, from the GGUF keys, checked once and frozen."""

import math
from dataclasses import dataclass

import numpy as np

from dali_gguf.errors import ModelFileError, UnsupportedError

GATING = {1: "softmax", 2: "sigmoid", 3: "softmax_after"}  # expert_gating_func
SCALINGS = ("none", "linear", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Keys rope.*: base of the frequencies and how they are stretched to longer contexts.

    scaling: none, linear or yarn. log_multiplier is 0.1 * mscale_all_dim of DeepSeek's configs.
    """

    n_rot: int
    base: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_original: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    log_multiplier: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Keys expert_*. n_expert 0: a dense model. norm is None where the file does not say."""

    n_expert: int = 0
    n_used: int = 0
    n_ff: int = 0
    n_shared: int = 0
    n_ff_shared: int = 0
    n_group: int = 1
    n_group_used: int = 1
    scale: float = 1.0
    norm: bool | None = None
    scoring: str | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """n_vocab 0: the file does not say, the embedding's shape decides. k_size, v_size: of a head.

    The last four are DeepSeek's latent attention: ranks of the compressed query and keys/values
    (0: none), sizes of a head's key and value when they are expanded.
    """

    architecture: str
    name: str
    n_layer: int
    n_layer_dense: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_ff: int
    n_head: int
    n_head_kv: int
    k_size: int
    v_size: int
    eps: float
    window: int
    rope: RopeConfig
    experts: ExpertConfig
    q_rank: int = 0
    kv_rank: int = 0
    k_size_mla: int = 0
    v_size_mla: int = 0

    @classmethod
    def from_metadata(cls, metadata: dict, path: str = "") -> "ModelConfig":
        """Raises ModelFileError that names the file, the key, its value, and what was expected."""
        keys = Keys(metadata, path)
        n_embd, n_head = keys.size("embedding_length"), keys.size("attention.head_count")
        k_size = keys.size("attention.key_length", n_embd // n_head or None)
        n_layer = keys.size("block_count") - keys.count("nextn_predict_layers", 0)
        config = cls(
            architecture=keys.architecture,
            name=keys.text("general.name", ""),
            n_layer=n_layer,
            n_layer_dense=keys.count("leading_dense_block_count", 0),
            n_ctx_train=keys.size("context_length"),
            n_embd=n_embd,
            n_vocab=keys.vocabulary_size() or keys.count("vocab_size", 0),
            n_ff=keys.count("feed_forward_length", 0),
            n_head=n_head,
            n_head_kv=keys.size("attention.head_count_kv", n_head),
            k_size=k_size,
            v_size=keys.size("attention.value_length", k_size),
            eps=keys.real("attention.layer_norm_rms_epsilon"),
            window=keys.count("attention.sliding_window", 0),
            rope=rope_config(keys, k_size),
            experts=expert_config(keys),
            q_rank=keys.count("attention.q_lora_rank", 0),
            kv_rank=keys.count("attention.kv_lora_rank", 0),
            k_size_mla=keys.count("attention.key_length_mla", 0),
            v_size_mla=keys.count("attention.value_length_mla", 0),
        )
        check(keys, config)
        return config


class Keys:
    """Typed access to the keys of one architecture."""

    LARGEST = 2**31 - 1

    def __init__(self, metadata: dict, path: str = ""):
        self.metadata, self.prefix = metadata, f"{path}: " if path else ""
        self.architecture = self.text("general.architecture")

    def full(self, key: str) -> str:
        return key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"

    def wrong(self, key: str, expected: str) -> ModelFileError:
        found = self.metadata.get(self.full(key))
        what = "is missing" if found is None else f"is {short(found)}"
        return ModelFileError(f"{self.prefix}key {self.full(key)} {what}; expected {expected}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(self.full(key), default)
        if type(value) is not str:
            raise self.wrong(key, "a text")
        return value

    def vocabulary_size(self) -> int:
        """Number of tokens; 0 if the file has no vocabulary."""
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        if type(tokens) is not list:
            raise self.wrong("tokenizer.ggml.tokens", "an array of texts")
        return len(tokens)

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(self.full(key))
        if value is not None and type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        """An integer of at least `least`; an array is taken if all layers have the same value."""
        value = self.metadata.get(self.full(key), default)
        if type(value) is np.ndarray and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or not least <= value <= self.LARGEST:
            raise self.wrong(key, f"one whole number from {least} to {self.LARGEST}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        return self.count(key, default, 1)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number above 0. Where there is a default, 0 stands for it, as in llama.cpp."""
        value = self.metadata.get(self.full(key), default)
        if type(value) is float and value == 0 and default is not None:
            value = default
        good = type(value) in (int, float) and (value == default or 0 < value < math.inf)
        if not good:
            raise self.wrong(key, "a number above 0")
        return float(value)


def short(value) -> str:
    """A value for an error line."""
    if type(value) is np.ndarray or type(value) is list:
        return f"an array of {len(value)}"
    return repr(value)[:60]


def rope_config(keys: Keys, k_size: int) -> RopeConfig:
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in SCALINGS:
        raise UnsupportedError(
            f"{keys.prefix}key {keys.full('rope.scaling.type')} is {scaling!r}; "
            f"supported are {', '.join(SCALINGS)}"
        )
    return RopeConfig(
        n_rot=keys.size("rope.dimension_count", k_size),
        base=keys.real("rope.freq_base", 10000.0),
        scaling="none" if factor == 1.0 else scaling,
        factor=factor,
        n_ctx_original=keys.size(
            "rope.scaling.original_context_length", keys.size("context_length")
        ),
        attention_factor=keys.real("rope.scaling.attn_factor", 1.0),
        beta_fast=keys.real("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1.0),
        log_multiplier=keys.real("rope.scaling.yarn_log_multiplier", 0.0),
    )


def expert_config(keys: Keys) -> ExpertConfig:
    n_expert = keys.count("expert_count", 0)
    if n_expert == 0:
        return ExpertConfig()
    gating = keys.count("expert_gating_func", 0)
    if gating not in (0, *GATING):
        raise keys.wrong(
            "expert_gating_func", "1 (softmax), 2 (sigmoid) or 3 (softmax over the chosen)"
        )
    return ExpertConfig(
        n_expert=n_expert,
        n_used=keys.size("expert_used_count"),
        n_ff=keys.count("expert_feed_forward_length", 0),
        n_shared=keys.count("expert_shared_count", 0),
        n_ff_shared=keys.count("expert_shared_feed_forward_length", 0),
        n_group=keys.count("expert_group_count", 1) or 1,
        n_group_used=keys.count("expert_group_used_count", 1) or 1,
        scale=keys.real("expert_weights_scale", 1.0),
        norm=keys.flag("expert_weights_norm"),
        scoring=GATING.get(gating),
    )


def check(keys: Keys, c: ModelConfig) -> None:
    """Values that contradict each other."""
    e = c.experts
    if c.n_layer < 1:
        raise keys.wrong(
            "nextn_predict_layers", f"fewer than block_count ({keys.count('block_count')})"
        )
    if c.n_head % c.n_head_kv:
        raise keys.wrong("attention.head_count_kv", f"a divisor of head_count ({c.n_head})")
    if c.rope.n_rot % 2 or c.rope.n_rot > max(c.k_size, c.k_size_mla):
        raise keys.wrong("rope.dimension_count", f"an even number up to the head size ({c.k_size})")
    if c.rope.base <= 1:
        raise keys.wrong("rope.freq_base", "a number above 1")
    if e.n_used > e.n_expert:
        raise keys.wrong("expert_used_count", f"at most expert_count ({e.n_expert})")
    if e.n_expert % e.n_group:
        raise keys.wrong("expert_group_count", f"a divisor of expert_count ({e.n_expert})")
    if not e.n_group_used <= e.n_group or e.n_used > e.n_group_used * max(
        1, e.n_expert // e.n_group
    ):
        raise keys.wrong(
            "expert_group_used_count",
            f"at most {e.n_group} groups, and room for {e.n_used} experts",
        )
