"""The writer: what gguf-py reads back, and that no half file ever gets the final name."""

import errno
import os

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader

from dali_gguf.convert import gguf_output
from dali_gguf.convert.gguf_output import (
    OutputFile,
    TensorInfo,
    V,
    array,
    boolean,
    f32,
    header,
    scalar,
    string,
    u32,
)
from dali_gguf.convert.gguf_typed import read_typed
from dali_gguf.errors import ConvertError

KEYS = {
    "general.architecture": string("llama"), "a.text": string("ü\n"), "a.int": u32(7),
    "a.real": f32(0.5),
    "a.flag": boolean(True), "a.wide": scalar(V.INT64, -5), "a.words": array(V.STRING, ["x", "",
    "é"]),
    "a.numbers": array(V.INT32, [1, -2, 3]), "a.scores": array(V.FLOAT32, [0.5]),
}  # fmt: skip


def write(path, data: np.ndarray) -> None:
    head = header(KEYS, [TensorInfo("w", data.shape, T.F32), TensorInfo("v", (3,), T.F32)])
    with OutputFile(path, 10_000) as out:
        out.write(head)
        for values in (data, np.arange(3, dtype=np.float32)):
            out.write(values.reshape(-1).view(np.uint8))
            out.pad()
        out.commit()


def test_gguf_py_reads_it(tmp_path):
    data = np.arange(10, dtype=np.float32).reshape(2, 5)
    write(tmp_path / "x.gguf", data)
    reader = GGUFReader(tmp_path / "x.gguf")
    assert reader.fields["a.text"].contents() == "ü\n"
    assert reader.fields["a.words"].contents() == ["x", "", "é"]
    assert reader.fields["a.numbers"].contents() == [1, -2, 3]
    assert (reader.fields["a.int"].contents(), reader.fields["a.wide"].contents()) == (7, -5)
    w, v = reader.tensors
    assert np.array_equal(w.data, data) and np.array_equal(v.data, [0, 1, 2])


def test_keys_keep_their_types(tmp_path):
    write(tmp_path / "x.gguf", np.zeros((1, 4), np.float32))
    assert read_typed(tmp_path / "x.gguf") == KEYS


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), OutputFile(path, 10) as out:
        out.write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["x.gguf"] and path.read_bytes() == b"old"


def test_interrupt_is_one_line(tmp_path):
    with pytest.raises(ConvertError, match="interrupted, nothing was left behind"):
        with OutputFile(tmp_path / "x.gguf", 10) as out:
            out.write(b"new")
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


class FullDisk:
    """A file on a disk that takes so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def close(self):
        self.file.close()


def test_disk_full_midway(tmp_path):
    with pytest.raises(ConvertError, match="disk full after"):
        with OutputFile(tmp_path / "x.gguf", 1000) as out:
            out.file = FullDisk(out.file, 100)
            out.write(np.zeros(1000, np.uint8))
    assert os.listdir(tmp_path) == []


def test_too_little_room_is_said_before_the_work(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 5_000_000})
    monkeypatch.setattr(gguf_output.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConvertError, match=r"needs 1.00 GB, 0.01 GB are free"):
        OutputFile(tmp_path / "x.gguf", 1_000_000_000)


def test_short_writes_are_continued(tmp_path):
    class Slow(FullDisk):
        def write(self, data):
            return self.file.write(data[:7])

    with OutputFile(tmp_path / "x.gguf", 100) as out:
        out.file = Slow(out.file, 0)
        out.write(np.arange(100, dtype=np.uint8))
        out.commit()
    assert (tmp_path / "x.gguf").read_bytes() == bytes(range(100))
