"""A Hugging Face checkpoint folder: config.json and the weights of its safetensors files.

Format of a safetensors file: u64 length, JSON header, raw little-endian data
(https://github.com/huggingface/safetensors). Weights are mapped, never loaded as a whole.
"""

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from dali_gguf.convert.fp8 import E4M3, E5M2
from dali_gguf.errors import ConvertError

INDEX = "model.safetensors.index.json"
TYPES = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
    "F8_E4M3": np.dtype("u1"), "F8_E5M2": np.dtype("u1"), "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "BOOL": np.dtype("?"),
}  # fmt: skip
PLAIN = {"F32": Type.F32, "F16": Type.F16, "BF16": Type.BF16}
REFUSED = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "aqlm": "AQLM", "hqq": "HQQ",
    "quanto": "Quanto", "eetq": "EETQ", "bitnet": "BitNet",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt", "torchao": "torchao", "higgs": "HIGGS", "vptq": "VPTQ", "spqr": "SpQR",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One tensor of a checkpoint. dtype is safetensors' name for it.

    rows() reads a range of the rows of the tensor flattened to a matrix; an FP8 weight comes
    multiplied by its scales, as float32. type is the type of what rows() gives.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # [prod(shape[:-1]), shape[-1]], mapped
    scale: np.ndarray | None = None  # float32 [row blocks, column blocks] of the flattened matrix
    block: tuple[int, int] = (1, 1)

    @property
    def type(self) -> Type:
        return PLAIN.get(self.dtype, Type.F32)

    def rows(self, first: int, count: int) -> np.ndarray:
        """[count, cols]: float32, float16, or uint16 (the bits of bfloat16)."""
        part = self.data[first : first + count]
        if self.dtype in PLAIN:
            return part
        if self.dtype == "F64":
            return part.astype(np.float32)
        if self.dtype not in ("F8_E4M3", "F8_E5M2"):
            raise ConvertError(
                f"tensor {self.name}: type {self.dtype}, expected F32, F16, BF16 or FP8"
            )
        values = (E4M3 if self.dtype == "F8_E4M3" else E5M2)[part]
        if self.scale is None:
            return values
        at_row = np.arange(first, first + count) // self.block[0]
        at_col = np.arange(part.shape[1]) // self.block[1]
        return values * self.scale[at_row[:, None], at_col[None, :]]

    def all(self) -> np.ndarray:
        """The tensor in its own shape, as rows() gives it."""
        return self.rows(0, len(self.data)).reshape(self.shape)


def read_json(path: Path, what: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise ConvertError(f"{path.parent}: no {path.name}; expected {what}") from None
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: cannot be read as JSON: {error}; fetch it again") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: a {type(value).__name__}, expected a JSON object")
    return value


def read_config(folder: Path) -> dict:
    """The raw config.json, with a text_config laid over the top level."""
    config = read_json(folder / "config.json", "the folder of a Hugging Face checkpoint")
    for part in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(part), dict):
            config = {**config, **config[part]}
    refuse_quantized(folder, config)
    return config


def refuse_quantized(folder: Path, config: dict) -> None:
    """Raises ConvertError for a checkpoint quantized by a method that this program cannot undo."""
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", "")).lower()
    if method in ("", "fp8", "mxfp4"):
        return
    if method == "compressed-tensors" and quantization.get("format") in (
        "float-quantized",
        "naive-quantized",
    ):
        return  # FP8 with a scale a tensor, row or block
    name = REFUSED.get(method, method)
    raise ConvertError(
        f"{folder}: the checkpoint is quantized with {name}; "
        "convert the original one (bfloat16, float16, float32, FP8 or MXFP4)"
    )


def shard_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files, and tensor name -> file of the index if there is one."""
    if (folder / INDEX).is_file():
        where = read_json(folder / INDEX, "an index").get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ConvertError(f"{folder / INDEX}: no weight_map; fetch it again")
        files = [folder / name for name in sorted(set(where.values()))]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ConvertError(
                f"{folder}: {len(missing)} of {len(files)} shards are missing: {missing[0]}; "
                f"fetch them"
            )
        return files, where
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        other = sorted(folder.glob("pytorch_model*.bin"))
        hint = (
            "save it as safetensors first (the .bin files may hold code)"
            if other
            else "expected model.safetensors"
        )
        raise ConvertError(f"{folder}: no safetensors files; {hint}")
    expected = files[0].stem.rpartition("-of-")[2]
    if "-of-" in files[0].stem and expected.isdigit() and len(files) != int(expected):
        raise ConvertError(
            f"{folder}: {len(files)} of {int(expected)} shards are there; fetch the others"
        )
    return files, {}


def read_weights(folder: Path, config: dict) -> dict[str, Weight]:
    """All tensors by name, scales of FP8 weights joined to them. Raises ConvertError."""
    files, where = shard_files(folder)
    weights: dict[str, Weight] = {}
    for path in files:
        weights.update((w.name, w) for w in read_file(path))
    missing = [name for name in where if name not in weights]
    if missing:
        raise ConvertError(
            f"{folder}: tensor {missing[0]} is in the index but in no shard; fetch "
            f"{where[missing[0]]}"
        )
    return join_scales(weights, config)


def read_file(path: Path) -> Iterator[Weight]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        if size < 8:
            raise ConvertError(f"{path}: {size} bytes, not a safetensors file; fetch it again")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    head = int.from_bytes(mapped[:8], "little")
    try:
        if head > size - 8:
            raise ValueError(f"header of {head} bytes in a file of {size}")
        header = json.loads(mapped[8 : 8 + head])
        header.pop("__metadata__", None)
        entries = [
            (n, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConvertError(
            f"{path}: damaged safetensors header ({error}); fetch it again"
        ) from None
    buffer, start = np.frombuffer(mapped, np.uint8), 8 + head
    for name, dtype, shape, begin, end in entries:
        if dtype not in TYPES:
            raise ConvertError(
                f"{path}: tensor {name} has the unknown type {dtype}; expected one of "
                f"{', '.join(TYPES)}"
            )
        expected = int(np.prod(shape, dtype=np.int64)) * TYPES[dtype].itemsize
        if end - begin != expected or begin < 0 or start + end > size:
            raise ConvertError(
                f"{path}: tensor {name} ends at byte {start + end} of {size}; the file is cut off"
            )
        raw = buffer[start + begin : start + end].view(TYPES[dtype])
        yield Weight(name, dtype, shape, raw.reshape(-1, shape[-1] if shape else 1))


def join_scales(weights: dict[str, Weight], config: dict) -> dict[str, Weight]:
    """FP8 weights with their scales (weight_scale_inv or weight_scale), which leave the list."""
    block = (config.get("quantization_config") or {}).get("weight_block_size") or (128, 128)
    joined = {}
    for name, weight in weights.items():
        if name.endswith(("_scale_inv", "_scale", ".input_scale", ".activation_scale")):
            owner = name.removesuffix("_inv").removesuffix("_scale")
            if owner in weights or name.endswith((".input_scale", ".activation_scale")):
                continue
        scale = weights.get(name + "_scale_inv", weights.get(name + "_scale"))
        if not weight.dtype.startswith("F8") or scale is None:
            joined[name] = weight
            continue
        joined[name] = scaled(weight, scale, tuple(block))
    return joined


def scaled(weight: Weight, scale: Weight, block: tuple[int, int]) -> Weight:
    values = scale.all()
    values = (
        (values.astype(np.uint32) << 16).view(np.float32)
        if scale.dtype == "BF16"
        else values.astype(np.float32)
    )
    rows, cols = weight.data.shape
    if values.size == 1:
        return Weight(
            weight.name, weight.dtype, weight.shape, weight.data, values.reshape(1, 1), (rows, cols)
        )
    if values.size == rows:
        return Weight(
            weight.name, weight.dtype, weight.shape, weight.data, values.reshape(-1, 1), (1, cols)
        )
    matrix_rows = weight.shape[-2] if len(weight.shape) > 1 else 1
    per_matrix = -(-matrix_rows // block[0])
    expected = (rows // matrix_rows * per_matrix, -(-cols // block[1]))
    values = values.reshape(-1, values.shape[-1])
    if values.shape != expected or (rows > matrix_rows and matrix_rows % block[0]):
        raise ConvertError(
            f"tensor {scale.name}: shape {scale.shape}, expected {expected[0]} x {expected[1]} "
            f"scales "
            f"of {block[0]} x {block[1]} blocks for {weight.name} {weight.shape}"
        )
    return Weight(weight.name, weight.dtype, weight.shape, weight.data, values, block)
