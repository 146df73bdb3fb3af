"""plan refuses what run refuses, with the same line, and prints nothing before."""

import struct

import numpy as np
import pytest

from dali_gguf.cli import main
from tests.small_gguf import small_tensors, write_small

I32 = 26


def line_of(capsys, *arguments: str) -> str:
    """The one line of an error; nothing on stdout."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "compiling kernels" not in line]
    assert out == "" and len(lines) == 1
    return lines[0]


@pytest.fixture(params=["type", "kinds", "tensor"])
def bad(request, tmp_path):
    """(model, what is said of it)."""
    path = tmp_path / "bad.gguf"
    if request.param == "kinds":  # gate in F32, up in Q8_0
        write_small(path, floats=("gate_inp", "gate_exps"))
        return str(path), "they need activations of different kinds"
    if request.param == "tensor":
        write_small(path, {**small_tensors(), "blk.0.odd.weight": np.zeros(32, np.float32)})
        return str(path), "not part of the llama architecture"
    name, data = b"blk.1.attn_norm.weight", bytearray(write_small(path).read_bytes())
    at = data.index(name) + len(name) + 4 + 8  # after the number of dimensions and the one
    data[at : at + 4] = struct.pack("<I", I32)
    path.write_bytes(data)
    return str(path), "blk.1.attn_norm.weight has the type I32; supported are F32"


def test_the_same_line_as_run(bad, capsys):
    model, expected = bad
    planned = line_of(capsys, "plan", model, "-c", "32")
    assert expected in planned
    assert line_of(capsys, "run", model, "-p", "w1", "-n", "2", "-t", "1") == planned


def test_nothing_is_printed_before_a_refusal(tmp_path, capsys):
    model = str(write_small(tmp_path / "small.gguf"))
    assert "no such file" in line_of(capsys, "plan", model, "--trace", str(tmp_path / "t.npz"))
    assert "too little" in line_of(capsys, "plan", model, "--ram", "1M")
