"""Tensors of a checkpoint to GGUF tensors: names, shapes, and the matrices they are made of.

Nothing is read here: each Part knows how to fetch one matrix when its turn comes. Both spellings of
experts are understood: one tensor an expert, and one of all experts with gate and up fused.
"""

import re
from dataclasses import dataclass

from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.checkpoint import Weight
from dali_gguf.convert.model_keys import Config
from dali_gguf.convert.parts import (
    Part,
    expert_part,
    llama3_factors,
    mxfp4_part,
    permuted_part,
    rows_part,
)
from dali_gguf.convert.quantize import forget
from dali_gguf.errors import ConvertError

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
ROLES = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
ONE_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
ALL_EXPERTS = re.compile(
    r"(?:mlp|block_sparse_moe)\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(_bias|_blocks|_scales|\.weight|)"
)
SHARED = re.compile(r"mlp\.shared_experts?\.(gate|up|down)_proj\.weight")
UNUSED = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A GGUF tensor before its type is chosen: name, shape (slowest first), and its parts in
    order."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def type(self) -> Type:
        return self.parts[0].type


class Mapper:
    """Collects the GGUF tensors of one checkpoint. tensors: by name, complete after finish()."""

    def __init__(self, config: Config):
        self.config = config
        self.tensors: dict[str, SourceTensor] = {}
        self.experts: dict[str, dict[int, Weight]] = {}
        self.mxfp4: dict[str, dict[str, Weight]] = {}

    def add(self, weight: Weight) -> None:
        """Raises ConvertError for a tensor that has no place in the architecture."""
        name = weight.name.replace("language_model.", "")
        if name.endswith(UNUSED):
            return
        if name in TOP:
            tied = self.config.architecture.name == "deepseek2" and self.config.get(
                "tie_word_embeddings"
            )
            if not (tied and name == "lm_head.weight"):
                self.plain(TOP[name], weight)
            return
        match = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        if not match:
            raise self.unknown(weight)
        if (
            int(match[1]) < self.config.n_layer
        ):  # beyond: layers that predict further tokens, not used
            self.layer(f"blk.{match[1]}.", match[2], weight)

    def unknown(self, weight: Weight) -> ConvertError:
        return ConvertError(
            f"{self.config.folder}: tensor {weight.name} {list(weight.shape)} has no place in "
            f"{self.config.architecture.name}; is config.json the right one?"
        )

    def put(self, name: str, shape: tuple[int, ...], parts: list[Part]) -> None:
        if name in self.tensors:
            raise ConvertError(
                f"{self.config.folder}: tensor {name} comes from two tensors of the checkpoint"
            )
        self.tensors[name] = SourceTensor(name, shape, tuple(parts))

    def plain(self, name: str, weight: Weight) -> None:
        self.put(name, weight.shape, [rows_part(weight, 0, len(weight.data))])

    def layer(self, prefix: str, name: str, weight: Weight) -> None:
        config, (stem, _, end) = self.config, name.rpartition(".")
        one, fused, shared = (
            ONE_EXPERT.fullmatch(name),
            ALL_EXPERTS.fullmatch(name),
            SHARED.fullmatch(name),
        )
        if one and one[2] in ROLES:
            self.experts.setdefault(f"{prefix}ffn_{ROLES[one[2]]}_exps.weight", {})[int(one[1])] = (
                weight
            )
        elif fused:
            self.fused(prefix, fused[1], fused[2], weight)
        elif shared:
            self.plain(f"{prefix}ffn_{shared[1]}_shexp.weight", weight)
        elif name == "mlp.gate.e_score_correction_bias":
            self.plain(prefix + "exp_probs_b.bias", weight)
        elif name == "self_attn.sinks":
            self.plain(prefix + "attn_sinks.weight", weight)
        elif name == "mlp.shared_expert_gate.weight":
            self.put(
                prefix + "ffn_gate_inp_shexp.weight", (weight.shape[-1],), [rows_part(weight, 0, 1)]
            )
        elif name == "post_attention_layernorm.weight" and config.architecture.name == "gpt-oss":
            self.plain(prefix + "post_attention_norm.weight", weight)
        elif stem == "self_attn.kv_b_proj" and end == "weight":
            self.compressed(prefix, weight)
        elif config.architecture.permuted and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            n_head = config.n_head if stem.endswith("q_proj") else config.n_head_kv
            self.put(f"{prefix}{LAYER[stem]}.{end}", weight.shape, [permuted_part(weight, n_head)])
        elif stem in LAYER and end in ("weight", "bias"):
            self.plain(f"{prefix}{LAYER[stem]}.{end}", weight)
        else:
            raise self.unknown(weight)

    def compressed(self, prefix: str, weight: Weight) -> None:
        """kv_b [H (nope + v), R] as k_b [H, R, nope] (absorbed into the query) and v_b [H, v,
        R]."""
        config = self.config
        nope, size, n_head = (
            config.count("qk_nope_head_dim"),
            config.count("v_head_dim"),
            config.n_head,
        )
        rank = weight.shape[-1]
        if weight.shape[0] != n_head * (nope + size):
            raise ConvertError(
                f"{config.folder}: tensor {weight.name} has {weight.shape[0]} rows, "
                f"expected {n_head} heads of {nope} + {size}"
            )
        keys = [rows_part(weight, h * (nope + size), nope, transpose=True) for h in range(n_head)]
        values = [rows_part(weight, h * (nope + size) + nope, size) for h in range(n_head)]
        self.put(prefix + "attn_k_b.weight", (n_head, rank, nope), keys)
        self.put(prefix + "attn_v_b.weight", (n_head, size, rank), values)

    def fused(self, prefix: str, role: str, suffix: str, weight: Weight) -> None:
        if suffix in ("_blocks", "_scales"):
            both = self.mxfp4.setdefault(f"{prefix}{role}", {})
            both[suffix] = weight
            if len(both) == 2:
                self.put_mxfp4(prefix, role, both["_blocks"], both["_scales"])
        elif suffix == "_bias":
            self.fused_bias(prefix, role, weight)
        else:
            self.fused_weight(prefix, role, weight)

    def fused_bias(self, prefix: str, role: str, weight: Weight) -> None:
        """[E, 2F], gate and up alternating (gpt-oss), or [E, D]."""
        names = (
            {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            if role == "gate_up_proj"
            else {"down": slice(None)}
        )
        for name, columns in names.items():
            shape = (weight.shape[0], len(range(weight.shape[1])[columns]))
            part = Part(
                lambda c=columns: weight.all()[:, c], weight.type, lambda: forget(weight.data)
            )
            self.put(f"{prefix}ffn_{name}_exps.bias", shape, [part])

    def fused_weight(self, prefix: str, role: str, weight: Weight) -> None:
        """[E, rows, D] (gate_up: gate rows, then up rows), or gpt-oss's [E, D, rows]
        interleaved."""
        config = self.config
        if len(weight.shape) != 3:
            raise self.unknown(weight)
        count, rows, cols = weight.shape
        gpt_oss = config.architecture.name == "gpt-oss"
        ff = config.get("moe_intermediate_size", "intermediate_size")
        wide = 2 * ff if role == "gate_up_proj" else ff
        turned = gpt_oss or (
            (rows, cols)
            == ((config.n_embd, wide) if role != "down_proj" else (wide, config.n_embd))
            and rows != cols
        )
        height = cols if turned else rows
        if role == "gate_up_proj":
            half = height // 2
            pick = (
                {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
                if gpt_oss
                else {"gate": slice(0, half), "up": slice(half, None)}
            )
        else:
            pick = {role.removesuffix("_proj"): slice(None)}
        for name, taken in pick.items():
            parts = [expert_part(weight, e, rows, turned, taken) for e in range(count)]
            shape = (count, len(range(height)[taken]), rows if turned else cols)
            self.put(f"{prefix}ffn_{name}_exps.weight", shape, parts)

    def put_mxfp4(self, prefix: str, role: str, blocks: Weight, scales: Weight) -> None:
        """blocks uint8 [E, rows, cols / 32, 16], scales uint8 [E, rows, cols / 32]."""
        if (
            blocks.dtype != "U8"
            or scales.dtype != "U8"
            or blocks.shape[:3] != scales.shape
            or blocks.shape[3:] != (16,)
        ):
            raise ConvertError(
                f"{self.config.folder}: tensors {blocks.name} {list(blocks.shape)} and "
                f"{scales.name} "
                f"{list(scales.shape)} are no MXFP4 blocks of 32"
            )
        count, rows, groups, _ = blocks.shape
        pick = (
            {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            if role == "gate_up_proj"
            else {"down": slice(None)}
        )
        for name, taken in pick.items():
            parts = [mxfp4_part(blocks, scales, e, taken) for e in range(count)]
            shape = (count, len(range(rows)[taken]), groups * 32)
            self.put(f"{prefix}ffn_{name}_exps.weight", shape, parts)

    def finish(self) -> dict[str, SourceTensor]:
        """Stacks the single experts and adds what is computed. Raises ConvertError for a gap."""
        for name, experts in self.experts.items():
            missing = [e for e in range(self.config.n_expert) if e not in experts]
            if missing or len(experts) != self.config.n_expert:
                raise ConvertError(
                    f"{self.config.folder}: {name} has {len(experts)} experts, config.json says "
                    f"{self.config.n_expert}"
                    + (f"; expert {missing[0]} is missing" if missing else "")
                )
            ordered = [experts[e] for e in range(len(experts))]
            odd = next(
                (w for w in ordered if w.shape != ordered[0].shape or w.type != ordered[0].type),
                None,
            )
            if odd is not None:
                raise ConvertError(
                    f"{self.config.folder}: tensor {odd.name} is {odd.dtype} {list(odd.shape)}, "
                    f"the first expert {ordered[0].dtype} {list(ordered[0].shape)}"
                )
            parts = [rows_part(w, 0, len(w.data)) for w in ordered]
            self.put(name, (len(ordered), *ordered[0].shape), parts)
        for both in self.mxfp4.values():
            if len(both) != 2:
                (only,) = both.values()
                raise ConvertError(
                    f"{self.config.folder}: tensor {only.name} has no blocks or scales beside it"
                )
        if str(self.config.rope["rope_type"]).lower() == "llama3":
            factors = llama3_factors(self.config.rope, self.config.head_size)
            part = Part(lambda: factors.reshape(1, -1), Type.F32, lambda: None)
            self.put("rope_freqs.weight", factors.shape, [part])
        return self.tensors
