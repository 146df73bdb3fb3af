"""Which tensor gets which type: llama.cpp's mixtures, tensor by tensor, with the reasons kept.

The tables state what llama-quantize does (ggml 0.25), so that a file made here has the same types.
"""

import re
from dataclasses import dataclass, field

from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.encode import tensor_bytes
from dali_gguf.convert.gguf_output import TensorInfo
from dali_gguf.errors import InputError

# mixture name: (general.file_type, type of an ordinary matrix)
MIXTURES = {
    "F32": (0, Type.F32), "F16": (1, Type.F16), "BF16": (32, Type.BF16),
    "Q8_0": (7, Type.Q8_0), "Q4_0": (2, Type.Q4_0), "Q4_1": (3, Type.Q4_1), "Q5_0": (8, Type.Q5_0),
    "Q5_1": (9, Type.Q5_1), "Q2_K": (10, Type.Q2_K), "Q3_K_S": (11, Type.Q3_K),
    "Q3_K_M": (12, Type.Q3_K), "Q3_K_L": (13, Type.Q3_K), "Q4_K_S": (14, Type.Q4_K),
    "Q4_K_M": (15, Type.Q4_K), "Q5_K_S": (16, Type.Q5_K), "Q5_K_M": (17, Type.Q5_K),
    "Q6_K": (18, Type.Q6_K), "IQ4_NL": (25, Type.IQ4_NL), "IQ4_XS": (30, Type.IQ4_XS),
    "MXFP4_MOE": (38, Type.MXFP4),
}  # fmt: skip
SYNONYMS = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
FALLBACK = {
    Type.Q2_K: Type.Q4_0, Type.Q3_K: Type.Q4_0, Type.IQ4_XS: Type.IQ4_NL, Type.Q4_K: Type.Q5_0,
    Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0,
}  # fmt: skip
# small or sensitive matrices that stay as they are
KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight")


def parse_mixture(name: str) -> str:
    """The mixture's own name; raises InputError with the list of names."""
    upper = SYNONYMS.get(name.upper(), name.upper())
    if upper not in MIXTURES:
        raise InputError(f"type {name!r} is unknown; expected one of {' '.join(MIXTURES)}")
    return upper


def parse_type(name: str) -> Type:
    known = [t.name for _, t in MIXTURES.values()]
    if name.upper() not in known:
        raise InputError(
            f"tensor type {name!r} is unknown; expected one of {' '.join(dict.fromkeys(known))}"
        )
    return Type[name.upper()]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the mixtures look at. gqa: query heads a key/value head; n_layer counts all layers."""

    architecture: str
    n_layer: int
    n_expert: int
    gqa: int

    @property
    def is_70b(self) -> bool:
        return self.architecture == "llama" and self.n_layer == 80 and self.gqa != 1


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for beyond the mixture's name. overrides: (regex, type), first match
    wins."""

    overrides: tuple[tuple[str, Type], ...] = ()
    output: Type | None = None
    embedding: Type | None = None
    pure: bool = False
    imatrix: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One tensor's type, and the type its recipe wanted where its rows do not allow that."""

    info: TensorInfo
    wanted: Type

    @property
    def fell_back(self) -> bool:
        return self.wanted != self.info.type


def tensor_order(name: str) -> tuple[int, str]:
    """Sort key of llama.cpp's tensor order: tensors of no layer first, then layer by layer."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name)


def category(name: str) -> str:
    if name == "output.weight":
        return "output"
    if name == "token_embd.weight":
        return "embedding"
    for part, kind in (
        ("attn_qkv.weight", "v"), ("attn_kv_b.weight", "v"), ("attn_v.weight", "v"),
        ("attn_k.weight", "k"), ("attn_q.weight", "q"), ("attn_output.weight", "attn_output"),
        ("ffn_up", "up"), ("ffn_gate", "gate"), ("ffn_down", "down"),
    ):  # fmt: skip
        if part in name:
            return kind
    return "other"


def may_quantize(name: str, shape: tuple[int, ...]) -> bool:
    dims = len(shape)
    while dims > 1 and shape[len(shape) - dims] == 1:
        dims -= 1  # GGUF does not count leading dimensions of 1
    return dims > 1 and name.endswith("weight") and not any(part in name for part in KEPT)


def more_bits(i: int, n: int) -> bool:
    """The first and last eighth of the layers and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(slots=True)
class Recipe:
    """Chooses the types of one model's tensors; choose() is called in tensor_order."""

    mixture: str
    facts: ModelFacts
    wishes: Wishes
    tied: bool
    n_value: int
    default: Type = field(init=False)
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.default = MIXTURES[self.mixture][1]

    def choose(self, info: TensorInfo) -> Choice:
        """info.type is the type the tensor has now; tensors that are not quantized keep it."""
        kind, name = category(info.name), info.name
        if not may_quantize(name, info.shape):
            return Choice(info, info.type)
        wishes = self.wishes
        if wishes.embedding is not None and kind == "embedding":
            return self._fit(info, wishes.embedding)
        if wishes.output is not None and kind == "output":
            return self._fit(info, wishes.output)
        if self.mixture in ("F32", "F16", "BF16"):
            return Choice(TensorInfo(name, info.shape, self.default), self.default)
        for pattern, type_ in wishes.overrides:
            if re.search(pattern, name):
                return self._fit(info, type_)
        return self._fit(info, self.default if wishes.pure else self._mixed(info, kind))

    def _fit(self, info: TensorInfo, wanted: Type) -> Choice:
        cols, type_ = info.shape[-1], wanted
        if cols % GGML_QUANT_SIZES[type_][0]:
            type_ = FALLBACK.get(type_, type_)
        if cols % GGML_QUANT_SIZES[type_][0]:
            type_ = Type.F16
        return Choice(TensorInfo(info.name, info.shape, type_), wanted)

    def _mixed(self, info: TensorInfo, kind: str) -> Type:
        if kind == "output" or (self.tied and kind == "embedding"):
            if self.wishes.output is not None:
                return self.wishes.output
            fits = info.shape[-1] % GGML_QUANT_SIZES[self.default][0] == 0
            keeps = self.mixture in ("MXFP4_MOE", "Q8_0") or not fits
            return Type.Q8_0 if keeps else Type.Q6_K
        if self.mixture == "MXFP4_MOE":
            return Type.MXFP4 if len(info.shape) > 2 and info.shape[0] > 1 else Type.Q8_0
        position = self.seen.get(kind, 0)
        self.seen[kind] = position + 1
        if kind == "v":
            return self._value(position)
        if kind == "k" and self.facts.n_expert == 8:
            return Type.Q8_0
        if kind == "down":
            layer = tensor_order(info.name)[0] if self.facts.n_expert > 1 else position
            return self._down(layer)
        if kind == "attn_output":
            return self._attention_output()
        return self.default

    def _value(self, position: int) -> Type:
        mixture, facts, type_ = self.mixture, self.facts, self.default
        if mixture == "Q2_K":
            type_ = Type.Q4_K if facts.gqa >= 4 else Type.Q3_K
        elif mixture == "Q3_K_M":
            type_ = Type.Q5_K if position < 2 else Type.Q4_K
        elif mixture == "Q3_K_L" or (mixture in ("IQ4_NL", "IQ4_XS") and facts.gqa >= 4):
            type_ = Type.Q5_K
        elif mixture in ("Q4_K_M", "Q5_K_M") and more_bits(position, self.n_value):
            type_ = Type.Q6_K
        elif mixture == "Q4_K_S" and position < 4:
            type_ = Type.Q5_K
        if facts.is_70b and type_ in (Type.Q3_K, Type.Q4_K):
            type_ = Type.Q5_K
        return Type.Q8_0 if facts.n_expert == 8 else type_

    def _down(self, layer: int) -> Type:
        mixture, n = self.mixture, self.facts.n_layer
        if mixture == "Q2_K":
            return Type.Q3_K
        if mixture == "Q3_K_M":
            return Type.Q5_K if layer < n // 16 else Type.Q4_K
        if mixture == "Q3_K_L":
            return Type.Q5_K
        if mixture in ("Q4_K_M", "Q5_K_M") and more_bits(layer, n):
            return Type.Q6_K
        early = layer < n // 8
        if early and (
            mixture == "Q4_K_S" or (mixture in ("IQ4_NL", "IQ4_XS") and not self.wishes.imatrix)
        ):
            return Type.Q5_K
        if early and self.wishes.imatrix and mixture in ("Q4_0", "Q5_0"):
            return Type.Q4_1 if mixture == "Q4_0" else Type.Q5_1
        return self.default

    def _attention_output(self) -> Type:
        mixture = self.mixture
        if self.facts.n_expert == 8:
            eased = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "Q4_K_S", "Q4_K_M", "IQ4_XS")
            return Type.Q5_K if mixture in eased else self.default
        return {"Q2_K": Type.Q3_K, "Q3_K_M": Type.Q4_K, "Q3_K_L": Type.Q5_K}.get(
            mixture, self.default
        )


def choose_types(
    mixture: str, facts: ModelFacts, wishes: Wishes, tensors: list[TensorInfo]
) -> list[Choice]:
    """Types of all tensors, in the order of `tensors`."""
    names = {t.name for t in tensors}
    n_value = sum(category(name) == "v" for name in names)
    recipe = Recipe(mixture, facts, wishes, "output.weight" not in names, n_value)
    chosen = {t.name: recipe.choose(t) for t in sorted(tensors, key=lambda t: tensor_order(t.name))}
    return [chosen[t.name] for t in tensors]


def bits_per_weight(tensors: list[TensorInfo]) -> float:
    weights = sum(tensor_bytes(Type.F32, t.shape) // 4 for t in tensors)
    return 8 * sum(t.nbytes for t in tensors) / max(1, weights)
