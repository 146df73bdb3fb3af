"""Tensors by name and shape, and the three forms experts come in."""

from dataclasses import dataclass

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.tensor import Tensor
from dali_gguf.weights import Weights
from tests.numpy_device import NumpyDevice, dequantize

E, F, D = 3, 4, 8


@dataclass
class File:
    tensors: dict
    paths: tuple = ("m.gguf",)


def weights(**arrays) -> Weights:
    """Of a file with these float32 tensors; __ in a name stands for a dot."""
    tensors = {}
    for name, array in arrays.items():
        name = "blk.0.ffn_" + name.replace("__", ".")
        data = np.ascontiguousarray(array, np.float32).view(np.uint8).ravel()
        tensors[name] = Tensor(name, Q.F32, array.shape, data)
    return Weights(File(tensors), NumpyDevice())


def stacks() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    return {role: rng.standard_normal(shape).astype(np.float32) for role, shape in shapes.items()}


def forms(s: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    both = np.concatenate([s["gate"], s["up"]], axis=1)
    return {
        "merged": {f"{role}_exps__weight": a for role, a in s.items()},
        "single": {f"{role}__{e}__weight": a[e] for role, a in s.items() for e in range(E)},
        "fused": {"gate_up_exps__weight": both, "down_exps__weight": s["down"]},
    }


@pytest.mark.parametrize("form", ["merged", "single", "fused"])
def test_experts_in_three_forms(form):
    s = stacks()
    w = weights(**forms(s)[form])
    experts = w.experts(0, E, F, D)
    assert experts.n_expert == E and experts.gate_bias is None and w.ignored(1) == []
    for e in range(E):
        for role, matrix in zip(("gate", "up", "down"), experts.matrices(e), strict=True):
            assert np.array_equal(dequantize(matrix), s[role][e])


def test_a_part_of_a_stack_knows_where_it_lies():
    w = weights(**forms(stacks())["fused"])
    whole = w.get("blk.0.ffn_gate_up_exps.weight", E, 2 * F, D)
    experts = w.experts(0, E, F, D)
    assert experts.up[1].address == whole.address + experts.up[1].offset
    assert experts.up[1].offset == 4 * D * (2 * F + F)


def test_biases_together_or_apart():
    rng = np.random.default_rng(1)
    gate, up = rng.standard_normal((2, E, F)).astype(np.float32)
    apart = weights(**forms(stacks())["merged"], gate_exps__bias=gate, up_exps__bias=up)
    fused = np.concatenate([gate, up], axis=1)
    together = weights(**forms(stacks())["fused"], gate_up_exps__bias=fused)
    for w in (apart, together):
        experts = w.experts(0, E, F, D)
        assert np.array_equal(experts.gate_bias, gate) and np.array_equal(experts.up_bias, up)


def test_a_missing_expert_is_named():
    arrays = forms(stacks())["single"]
    del arrays["up__2__weight"]
    with pytest.raises(ModelFileError, match=r"m.gguf: tensor blk.0.ffn_up.2.weight is missing"):
        weights(**arrays).experts(0, E, F, D)


def test_shapes_are_compared():
    w = weights(x=np.zeros((4, 8)))
    assert w.find("blk.0.ffn_x", 4, 8).shape == w.find("blk.0.ffn_x", None, 8).shape == (4, 8)
    assert w.find("blk.0.ffn_y", 4, 8) is None
    for wrong in ((8, 4), (4,), (0, 8), (4, 8, 1)):
        with pytest.raises(ModelFileError, match="has the shape"):
            w.find("blk.0.ffn_x", *wrong)


def test_a_type_that_is_not_supported_is_named_with_its_tensor():
    w = weights()
    w.file.tensors["t"] = Tensor("t", Q.TQ1_0, (1, 256), np.zeros(54, np.uint8))
    with pytest.raises(UnsupportedError, match="tensor t has the type TQ1_0; supported are F32"):
        w.find("t", 1, 256)


def test_a_matrix_in_parts():
    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    first, second = weights(x=rows).row_parts("blk.0.ffn_x", (1, 2), 8)
    assert np.array_equal(dequantize(first), rows[:1])
    assert np.array_equal(dequantize(second), rows[1:])


@pytest.mark.parametrize("shape", [(D,), (1, D)])
def test_a_row_may_be_written_as_a_matrix(shape):
    w = weights(gate_inp_shexp__weight=np.arange(D).reshape(shape))
    row = w.row_matrix("blk.0.ffn_gate_inp_shexp.weight", D)
    assert dequantize(row).tolist() == [list(range(D))]
