"""A Hugging Face checkpoint as a planned GGUF file: keys, tensors, types. write_model writes it."""

import logging
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.checkpoint import read_config, read_weights
from dali_gguf.convert.encode import Matrix
from dali_gguf.convert.gguf_output import TensorInfo, Value, string, u32
from dali_gguf.convert.imatrix_file import Importance
from dali_gguf.convert.model_keys import Config, find_architecture, model_keys
from dali_gguf.convert.model_shapes import check_tensors
from dali_gguf.convert.model_tensors import Mapper, SourceTensor
from dali_gguf.convert.parts import Part
from dali_gguf.convert.quantize import QUANTIZATION_VERSION
from dali_gguf.convert.recipes import (
    MIXTURES,
    Choice,
    ModelFacts,
    Wishes,
    choose_types,
    may_quantize,
    tensor_order,
)
from dali_gguf.convert.vocabulary import tokenizer_keys, written_keys
from dali_gguf.convert.write_model import PlannedTensor
from dali_gguf.errors import ConvertError

MXFP4_MOE = 38


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    mixture: str
    metadata: dict[str, Value]
    tensors: list[PlannedTensor]
    inputs: list[Path]

    @property
    def choices(self) -> list[Choice]:
        return [t.choice for t in self.tensors]


def plan(
    folder: Path,
    mixture: str,
    wishes: Wishes = Wishes(),
    importance: Importance | None = None,
    pre: str | None = None,
    name: str | None = None,
) -> Conversion:
    """Decides everything about the file; no weight is read yet. Raises ConvertError.

    mixture: a name of recipes.MIXTURES, or "auto" for the checkpoint's own plain type.
    """
    values = read_config(folder)
    _, architecture = find_architecture(values, folder)
    config = Config(values, architecture, str(folder))
    weights = read_weights(folder, values)
    mapper = Mapper(config)
    for weight in weights.values():
        mapper.add(weight)
    sources = sorted(mapper.finish().values(), key=lambda t: tensor_order(t.name))
    check_tensors(config, sources)
    if mixture == "auto":
        mixture = own_type(sources)
    choices = _choose(config, sources, mixture, wishes)
    planned = [
        PlannedTensor(choice, _matrices(source, choice, importance))
        for source, choice in zip(sources, choices)
    ]
    metadata = general_keys(folder, architecture.name, sources, name) | model_keys(config)
    metadata |= tokenizer_keys(folder, config, pre)
    kept = any(s.type == Type.MXFP4 for s in sources) and mixture in ("F32", "F16", "BF16")
    metadata["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    metadata["general.file_type"] = u32(MXFP4_MOE if kept else MIXTURES[mixture][0])
    if importance is not None:
        metadata |= importance.keys()
    return Conversion(mixture, metadata, planned, sorted(folder.glob("*.safetensors")))


def own_type(sources: list[SourceTensor]) -> str:
    """The plain type of the first matrix: "auto" keeps a checkpoint as it is."""
    first = next((s for s in sources if len(s.shape) > 1 and s.type != Type.MXFP4), None)
    return first.type.name if first else "F32"


def _choose(
    config: Config, sources: list[SourceTensor], mixture: str, wishes: Wishes
) -> list[Choice]:
    """Types by the mixture; what it leaves alone is F32, and MXFP4 experts stay MXFP4."""
    facts = ModelFacts(
        config.architecture.name,
        config.n_layer,
        config.n_expert,
        config.n_head // (1 if config.architecture.name == "deepseek2" else config.n_head_kv),
    )
    infos = [
        TensorInfo(s.name, s.shape, s.type if may_quantize(s.name, s.shape) else Type.F32)
        for s in sources
    ]
    choices = choose_types(mixture, facts, wishes, infos)
    return [
        Choice(TensorInfo(s.name, s.shape, Type.MXFP4), Type.MXFP4)
        if s.type == Type.MXFP4
        else choice
        for s, choice in zip(sources, choices)
    ]


def _matrices(source: SourceTensor, choice: Choice, importance: Importance | None) -> list[Matrix]:
    rows = None
    if importance is not None and choice.info.type != source.type:
        rows = importance.of(source.name, source.shape)
    if rows is not None and len(rows) != len(source.parts):
        rows = np.broadcast_to(rows, (len(source.parts), rows.shape[1])) if len(rows) == 1 else None
    return [_matrix(part, None if rows is None else rows[i]) for i, part in enumerate(source.parts)]


def _matrix(part: Part, importance: np.ndarray | None) -> Matrix:
    def load() -> np.ndarray:
        rows = part.load()
        if part.type == Type.MXFP4:
            return rows
        return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)

    return Matrix(load, part.type, importance, part.release)


def general_keys(
    folder: Path, architecture: str, sources: list[SourceTensor], name: str | None
) -> dict[str, Value]:
    """general.*: names, license and the like from the model card, read by gguf-py."""
    logging.getLogger("gguf").setLevel(logging.ERROR)
    total, shared, expert, count = parameter_counts(sources)
    try:
        metadata = gguf.Metadata.load(None, folder, name, total)
    except Exception as error:  # the model card is free YAML: it never stops a conversion
        raise ConvertError(
            f"{folder}/README.md: its head cannot be read ({error}); repair or remove it"
        ) from error
    metadata.name = metadata.name or folder.resolve().name
    metadata.size_label = metadata.size_label or gguf.size_label(total, shared, expert, count)
    writer = gguf.GGUFWriter(None, architecture)
    metadata.set_gguf_meta_model(writer)
    return {
        "general.architecture": string(architecture),
        "general.type": string("model"),
        **written_keys(writer),
    }


def parameter_counts(sources: list[SourceTensor]) -> tuple[int, int, int, int]:
    """(all weights, weights outside experts, weights of one expert of every layer, experts a
    layer)."""
    total = shared = expert = experts = stacks = 0
    for source in sources:
        size = int(np.prod(source.shape, dtype=np.int64))
        total += size
        if "_exps." in source.name and len(source.shape) >= 3:
            expert += size // source.shape[0]
            experts, stacks = experts + source.shape[0], stacks + 1
        else:
            shared += size
    return total, shared, expert, experts // stacks if stacks else 0
