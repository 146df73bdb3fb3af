"""GGUF to a smaller GGUF: the types a mixture asks for, everything else copied."""

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES

from dali_gguf.convert.encode import Matrix
from dali_gguf.convert.gguf_output import TensorInfo, Value, u32
from dali_gguf.convert.gguf_typed import SPLIT_KEYS, read_typed
from dali_gguf.convert.imatrix_file import Importance
from dali_gguf.convert.quantizers import PLAIN
from dali_gguf.convert.recipes import (
    MIXTURES,
    Choice,
    ModelFacts,
    Wishes,
    choose_types,
    tensor_order,
)
from dali_gguf.convert.write_model import PlannedTensor
from dali_gguf.errors import InputError, ModelFileError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.tensor import Tensor

QUANTIZATION_VERSION = 2


@dataclass(frozen=True, slots=True, eq=False)
class Quantization:
    """What will be written: keys, tensors in llama.cpp's order, and the input's files."""

    metadata: dict[str, Value]
    tensors: list[PlannedTensor]
    inputs: list[Path]

    @property
    def choices(self) -> list[Choice]:
        return [t.choice for t in self.tensors]


def model_facts(metadata: dict, path: Path) -> ModelFacts:
    """The few sizes that recipes look at, from GGUF keys."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(
            f"{path}: general.architecture is missing; expected a model, not a vocabulary or "
            f"adapter"
        )

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        return int(value[0]) if isinstance(value, np.ndarray) else int(value)

    heads = number("attention.head_count", 1)
    kv_heads = number("attention.head_count_kv", heads)
    return ModelFacts(
        architecture,
        number("block_count", 0),
        number("expert_count", 0),
        heads // kv_heads if kv_heads else 0,
    )


def plan(
    file: GGUFFile,
    mixture: str,
    wishes: Wishes,
    importance: Importance | None = None,
    requantize: bool = False,
) -> Quantization:
    """Decides everything before the first byte is written. Raises InputError, ModelFileError."""
    path = file.paths[0]
    facts = model_facts(file.metadata, path)
    tensors = sorted(file.tensors.values(), key=lambda t: tensor_order(t.name))
    infos = [TensorInfo(t.name, squeezed(t.shape), t.type) for t in tensors]
    choices = choose_types(mixture, facts, wishes, infos)
    planned = []
    for tensor, choice in zip(tensors, choices):
        changes = choice.info.type != tensor.type
        if changes and tensor.type not in PLAIN and not requantize:
            raise InputError(
                f"{path}: tensor {tensor.name} is already {tensor.type.name}; quantize from an "
                f"F32, F16 or BF16 "
                "file, or accept the loss with --allow-requantize"
            )
        planned.append(PlannedTensor(choice, _matrices(tensor, importance if changes else None)))
    metadata = {k: v for k, v in read_typed(path).items() if k not in SPLIT_KEYS}
    metadata["general.quantization_version"] = u32(QUANTIZATION_VERSION)
    metadata["general.file_type"] = u32(MIXTURES[mixture][0])
    if importance is not None:
        metadata |= importance.keys()
    return Quantization(metadata, planned, file.paths)


def squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading dimensions of 1: llama.cpp does not write them."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _matrices(tensor: Tensor, importance: Importance | None) -> list[Matrix]:
    """The tensor as one matrix, or as one an expert where each has its own importance."""
    weights = importance.of(tensor.name, tensor.shape) if importance is not None else None
    block, size = GGML_QUANT_SIZES[tensor.type]
    row_bytes = tensor.cols // block * size
    raw = tensor.data.reshape(-1, row_bytes)
    count = 1 if weights is None else len(weights)
    rows = len(raw) // count
    parts = [raw[e * rows : (e + 1) * rows] for e in range(count)]
    return [
        Matrix(
            lambda part=part: part,
            tensor.type,
            None if weights is None else weights[e],
            lambda part=part: forget(part),
        )
        for e, part in enumerate(parts)
    ]


def forget(view: np.ndarray) -> None:
    """Lets go of the mapped pages of a view: they would count as this process's memory."""
    base = view
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    while isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = view.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        base.madvise(mmap.MADV_DONTNEED, first, length)
