"""offload/resident.py: dense weights in memory of our own."""

import os
import sys

import pytest

from dali_gguf.errors import ModelFileError
from dali_gguf.offload import resident
from tests.expert_files import File, model


@pytest.mark.parametrize("piece", [4096, 1 << 22])
def test_bytes_equal_the_files(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(resident, "PIECE", piece)
    files = [File(tmp_path / f"{i}.gguf", i) for i in range(2)]
    tensors = {f"t{i}": files[i % 2].tensor(f"t{i}", (i * 37 + 1, 96)) for i in range(6)}
    for file in files:
        file.write()
    own = resident.ResidentWeights(tensors)
    own.wait()
    for name, t in tensors.items():
        copy = own.tensors[name]
        assert copy.data.tobytes() == t.data.tobytes()
        assert copy.data.ctypes.data != t.data.ctypes.data
        assert (copy.name, copy.type, copy.shape) == (t.name, t.type, t.shape)
        assert copy.offset == t.offset


def test_a_cut_file_is_named(tmp_path):
    file = File(tmp_path / "model.gguf")
    tensors = {"output.weight": file.tensor("output.weight", (64, 96))}
    file.write()
    os.truncate(tmp_path / "model.gguf", 3000)
    with pytest.raises(ModelFileError, match="model.gguf: tensor output.weight at offset 1000"):
        resident.ResidentWeights(tensors).wait()


def test_experts_read_for_a_while_give_their_memory_back_after_an_error_too(tmp_path):
    if sys.platform != "linux":
        pytest.skip("memory is given back early on Linux only")
    layer = model(tmp_path)[0]
    with pytest.raises(KeyError), resident.read_experts(layer, [3, 1]) as some:
        for role in ("gate", "up", "down"):
            read = [t.data.tobytes() for t in getattr(some, role)]
            assert read == [getattr(layer, role)[e].data.tobytes() for e in (3, 1)]
        raise KeyError
    assert not some.gate[0].data.any()
