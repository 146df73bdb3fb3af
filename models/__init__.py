"""Architectures: one file each, named as general.architecture with `-` as `_`.

A file has `layers(weights, config) -> list[Layer]`, and `kv_shape` if its cache is unusual.
"""

import importlib
import pkgutil

from dali_gguf.config import Keys, ModelConfig
from dali_gguf.device import Device
from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.layers import Model
from dali_gguf.tensor import Tensor
from dali_gguf.weights import Weights

SPELLING = {"gpt_oss": "gpt-oss"}  # files whose architecture has a dash


def architectures() -> list[str]:
    """Every general.architecture that has a file here."""
    return [SPELLING.get(m.name, m.name) for m in pkgutil.iter_modules(__path__)]


def read_config(file: GGUFFile) -> ModelConfig:
    """The sizes, of an architecture that is known and with experts where the file has some.

    Raises UnsupportedError, ModelFileError.
    """
    path, name = file.paths[0], Keys(file.metadata, str(file.paths[0])).architecture
    if name not in architectures():
        known = ", ".join(architectures())
        raise UnsupportedError(f"{path}: architecture {name!r} is not supported; known are {known}")
    if not file.tensors:
        raise ModelFileError(
            f"{path}: the file has no tensors, only a vocabulary; expected a model"
        )
    config = ModelConfig.from_metadata(file.metadata, str(path))
    router = next((t for t in file.tensors if t.endswith(".ffn_gate_inp.weight")), None)
    if (router is None) != (config.experts.n_expert == 0):
        count = config.experts.n_expert or "missing"
        has = f"has the router {router}" if router else "has no router tensor"
        raise ModelFileError(f"{path}: key {name}.expert_count is {count}, but the file {has}")
    return config


def load_model(file: GGUFFile, config: ModelConfig, device: Device) -> Model:
    """config is read_config's. Weights are looked up and checked, not read.

    Raises UnsupportedError, ModelFileError.
    """
    name = config.architecture
    module = importlib.import_module(f"dali_gguf.models.{name.replace('-', '_')}")
    weights = Weights(file, device)
    layers = module.layers(weights, config)
    kv_shape = getattr(module, "kv_shape", plain_kv_shape)(weights, config)
    model = Model(weights, config, layers, kv_shape)
    ignored = weights.ignored(config.n_layer)
    if ignored:
        raise UnsupportedError(
            f"{file.paths[0]}: {len(ignored)} tensors are not part of the {name} architecture "
            f"as known here, the first is {ignored[0]}"
        )
    return model


class NoDevice:
    """Stands in for a device where a model is only checked, not run: nothing is read or
    compiled."""

    name = "none"

    def weight(self, tensor: Tensor) -> Tensor:
        return tensor

    def vector(self, tensor: Tensor) -> Tensor:
        return tensor


def check_model(file: GGUFFile, config: ModelConfig) -> None:
    """Raises what load_model and the first step would."""
    from dali_gguf.kernels.moe_plan import formats_of  # brings Numba

    for experts in load_model(file, config, NoDevice()).experts.values():
        formats_of(experts)


def plain_kv_shape(weights: Weights, config: ModelConfig) -> tuple[int, int, int]:
    return config.n_head_kv, config.k_size, config.v_size
