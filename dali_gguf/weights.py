"""A model's tensors by name, each compared with the shape the architecture expects."""

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.device import Device
from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor

SUPPORTED = (
    Q.F32,
    Q.F16,
    Q.BF16,
    Q.Q8_0,
    Q.Q4_0,
    Q.Q4_1,
    Q.Q5_0,
    Q.Q5_1,
    Q.Q2_K,
    Q.Q3_K,
    Q.Q4_K,
    Q.Q5_K,
    Q.Q6_K,
    Q.IQ4_NL,
    Q.IQ4_XS,
    Q.MXFP4,
)


class Weights:
    """Gives a model its tensors, as handles and arrays of its device.

    used: every tensor taken outside the experts, for the memory plan and the GB/s figure.
    """

    def __init__(self, file: GGUFFile, device: Device):
        self.file = file
        self.device = device
        self.path = file.paths[0]
        self.used: dict[str, Tensor] = {}
        self._asked: set[str] = set()

    def find(self, name: str, *shape: int | None) -> Tensor | None:
        """The tensor, or None if the file has none of that name. A size of None fits any."""
        self._asked.add(name)
        tensor = self.file.tensors.get(name)
        if tensor is None:
            return None
        found = tensor.shape
        while len(found) > len(shape) and found[0] == 1:  # some writers keep a row's (1, n)
            found = found[1:]
        fits = len(shape) == len(found) and all(s in (None, t) for s, t in zip(shape, found))
        if not fits:
            raise ModelFileError(
                f"{self.path}: tensor {name} has the shape {list(tensor.shape)}; "
                f"expected {list(shape)} (rows before columns)"
            )
        if tensor.type not in SUPPORTED:
            known = ", ".join(t.name for t in SUPPORTED)
            raise UnsupportedError(
                f"{self.path}: tensor {name} has the type {tensor.type.name}; supported are {known}"
            )
        return tensor

    def get(self, name: str, *shape: int) -> Tensor:
        tensor = self.find(name, *shape)
        if tensor is None:
            raise ModelFileError(
                f"{self.path}: tensor {name} is missing; expected one of the shape {list(shape)}"
            )
        return tensor

    def _note(self, tensor: Tensor) -> Tensor:
        self.used[tensor.name] = tensor
        return tensor

    def matrix(self, name: str, *shape: int):
        """A weight handle for device.matmul and device.embed."""
        return self.device.weight(self._note(self.get(name, *shape)))

    def row_matrix(self, name: str, n: int):
        """A vector [n] as the matrix [1, n]."""
        return self.device.weight(self._note(self.get(name, n)).part(0, 1))

    def row_parts(self, name: str, rows: tuple[int, ...], cols: int) -> tuple:
        """A matrix cut into matrices of that many rows each."""
        tensor, first, parts = self._note(self.get(name, sum(rows), cols)), 0, []
        for n in rows:
            parts.append(self.device.weight(tensor.part(first, n)))
            first += n
        return tuple(parts)

    def vector(self, name: str, *shape: int):
        """A small float32 array on the device."""
        return self.device.vector(self._note(self.get(name, *shape)))

    def maybe_vector(self, name: str, *shape: int):
        tensor = self.find(name, *shape)
        return None if tensor is None else self.device.vector(self._note(tensor))

    def host_vector(self, name: str, *shape: int) -> np.ndarray | None:
        """A small F32 tensor in host memory, or None."""
        tensor = self.find(name, *shape)
        if tensor is None:
            return None
        if tensor.type != Q.F32:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has the type {tensor.type.name}; supported is F32"
            )
        return self._note(tensor).data.view(np.float32).reshape(tensor.shape)

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def ignored(self, n_layer: int) -> list[str]:
        """Tensors of the model's layers that its architecture never asked for."""
        extra = tuple(
            f"blk.{i}." for i in range(n_layer, n_layer + 8)
        )  # token-prediction layers (MTP)
        return [n for n in self.file.tensors if n not in self._asked and not n.startswith(extra)]

    def experts(
        self, layer: int, n_expert: int, n_ff: int, n_embd: int, activation: str = "silu"
    ) -> LayerExperts:
        """The experts of a layer, in whichever of three forms the file has them.

        Merged stacks (ffn_gate_exps [E, F, D]), one stack for gate and up together
        (ffn_gate_up_exps [E, 2F, D], gate first), or a tensor an expert (ffn_gate.7), as in
        files from before 2024-04.
        """
        gate_bias, up_bias = self._gate_up_biases(layer, n_expert, n_ff)
        gate, up = self._gate_up(layer, n_expert, n_ff, n_embd)
        return LayerExperts(
            layer,
            gate,
            up,
            self._stack(layer, "down", n_expert, n_embd, n_ff),
            activation,
            gate_bias,
            up_bias,
            self.host_vector(f"blk.{layer}.ffn_down_exps.bias", n_expert, n_embd),
        )

    def _gate_up(self, layer: int, n_expert: int, n_ff: int, n_embd: int):
        fused = self.find(f"blk.{layer}.ffn_gate_up_exps.weight", n_expert, 2 * n_ff, n_embd)
        if fused is None:
            return (self._stack(layer, role, n_expert, n_ff, n_embd) for role in ("gate", "up"))
        starts = range(0, 2 * n_ff * n_expert, 2 * n_ff)
        return (
            tuple(fused.part(s, n_ff, f"{fused.name}[{e}] gate") for e, s in enumerate(starts)),
            tuple(
                fused.part(s + n_ff, n_ff, f"{fused.name}[{e}] up") for e, s in enumerate(starts)
            ),
        )

    def _stack(
        self, layer: int, role: str, n_expert: int, rows: int, cols: int
    ) -> tuple[Tensor, ...]:
        if self.has(f"blk.{layer}.ffn_{role}.0.weight"):
            return tuple(
                self.get(f"blk.{layer}.ffn_{role}.{e}.weight", rows, cols) for e in range(n_expert)
            )
        stack = self.get(f"blk.{layer}.ffn_{role}_exps.weight", n_expert, rows, cols)
        return tuple(stack.expert(e) for e in range(n_expert))

    def _gate_up_biases(self, layer: int, n_expert: int, n_ff: int):
        fused = self.host_vector(f"blk.{layer}.ffn_gate_up_exps.bias", n_expert, 2 * n_ff)
        if fused is not None:
            return np.ascontiguousarray(fused[:, :n_ff]), np.ascontiguousarray(fused[:, n_ff:])
        return tuple(
            self.host_vector(f"blk.{layer}.ffn_{role}_exps.bias", n_expert, n_ff)
            for role in ("gate", "up")
        )
