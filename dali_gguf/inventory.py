"""What a GGUF file holds: its tensors by group and type, its sizes; nothing is loaded."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from dali_gguf.tensor import Tensor

GROUPS = (  # the first pattern that is found in a tensor's name decides
    ("norms", r"norm"),
    ("experts", r"_exps\.|ffn_(gate|up|down)\.\d+\."),
    ("shared experts", r"shexp"),
    ("routers", r"ffn_gate_inp|exp_probs"),
    ("feed-forward", r"ffn_"),
    ("attention", r"attn"),
    ("embedding", r"token_embd"),
    ("output", r"^output\."),
    ("other", r""),
)
SIZES = {
    "layers": "block_count",
    "leading_dense_layers": "leading_dense_block_count",
    "context": "context_length",
    "embedding": "embedding_length",
    "feed_forward": "feed_forward_length",
    "heads": "attention.head_count",
    "heads_kv": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "rope_base": "rope.freq_base",
    "rope_scaling": "rope.scaling.type",
    "rope_factor": "rope.scaling.factor",
}
EXPERT_SIZES = {
    "count": "expert_count",
    "used": "expert_used_count",
    "shared": "expert_shared_count",
    "feed_forward": "expert_feed_forward_length",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors of one group and one type."""

    group: str
    type: str
    tensors: int
    weights: int
    bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights if self.weights else 0.0

    def as_dict(self) -> dict:
        return asdict(self) | {"bits_per_weight": round(self.bits_per_weight, 3)}


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS if re.search(pattern, name))


def rows(tensors: Iterable[Tensor]) -> list[Row]:
    """One row a group and type, in the order of GROUPS, the largest type of a group first."""
    found: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((group_of(tensor.name), tensor.type.name), []).append(tensor)
    made = [
        Row(
            group,
            type,
            len(members),
            sum(int(np.prod(tensor.shape, dtype=np.int64)) for tensor in members),
            sum(tensor.nbytes for tensor in members),
        )
        for (group, type), members in found.items()
    ]
    order = [group for group, _ in GROUPS]
    return sorted(made, key=lambda row: (order.index(row.group), -row.bytes))


def total(parts: list[Row], group: str = "total") -> Row:
    types = {row.type for row in parts}
    return Row(
        group,
        types.pop() if len(types) == 1 else "mixed" if types else "",
        sum(row.tensors for row in parts),
        sum(row.weights for row in parts),
        sum(row.bytes for row in parts),
    )


def sizes(metadata: dict, names: dict[str, str]) -> dict:
    """The keys of the file's architecture that it has, as plain numbers, under shorter names."""
    architecture = metadata.get("general.architecture", "")
    found = {name: metadata.get(f"{architecture}.{key}") for name, key in names.items()}
    return {name: plain(value) for name, value in found.items() if value is not None}


def plain(value):
    """A key's value for JSON; an array of one repeated number is that number."""
    if isinstance(value, np.ndarray):
        same = value.size > 0 and bool((value == value.flat[0]).all())
        return value.flat[0].item() if same else value.tolist()
    return value


def experts(metadata: dict, parts: list[Row]) -> dict:
    """Counts, bytes, and what a token reads: all but the experts it is not routed to.

    bytes_per_token leaves out the embedding, of which a token reads one row.
    """
    found = sizes(metadata, EXPERT_SIZES)
    all_bytes = total(parts).bytes
    expert_bytes = sum(row.bytes for row in parts if row.group == "experts")
    embedding = sum(row.bytes for row in parts if row.group == "embedding")
    tied = not any(row.group == "output" for row in parts)
    count, used = found.get("count"), found.get("used")
    share = used / count if type(count) is type(used) is int and count > 0 else 1.0
    found["bytes"] = expert_bytes
    found["share_of_file"] = round(expert_bytes / all_bytes, 4) if all_bytes else 0.0
    found["bytes_per_token"] = round(
        all_bytes - expert_bytes * (1 - share) - (0 if tied else embedding)
    )
    return found


def tokenizer(metadata: dict) -> dict:
    """Kind of vocabulary, its size, and its special tokens by name."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    found = {
        "model": str(metadata.get("tokenizer.ggml.model", "")),
        "pre": str(metadata.get("tokenizer.ggml.pre", "")),
        "tokens": len(tokens),
        "chat_template": bool(metadata.get("tokenizer.chat_template")),
    }
    for name in ("bos", "eos"):
        id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(id, int) and 0 <= id < len(tokens):
            found[name] = tokens[id]
    return found
