"""offload/direct_io.py: right bytes at any offset, a clear error for every way a file goes bad."""

import errno
import os
import sys

import numpy as np
import pytest

from dali_gguf.errors import ModelFileError
from dali_gguf.offload.direct_io import PAGE, Memory, ModelFile, page_span

LINUX = sys.platform.startswith("linux")
SIZE = 300_123


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


def fetch(file, offset, nbytes, name="blk.0.ffn_up_exps.weight[3]"):
    memory = Memory(page_span(offset, nbytes))
    file.read(memory.view, offset, nbytes, name)
    start = offset % PAGE
    return bytes(memory.view[start : start + nbytes])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset, nbytes", [
    (0, 1), (0, PAGE), (512, PAGE), (1, 2 * PAGE), (4095, 2), (100_001, 50_000),
    (SIZE - 10, 10), (0, SIZE),
])
def test_any_range_comes_whole(path, direct, offset, nbytes):
    file = ModelFile(path, direct)
    assert fetch(file, offset, nbytes) == path.read_bytes()[offset : offset + nbytes]
    file.close()


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match="nowhere.gguf"):
        ModelFile(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("left", [0, 4096, 200_000, 250_100])
def test_a_file_cut_while_in_use_is_an_error(path, direct, left):
    file = ModelFile(path, direct)
    os.truncate(path, left)
    wanted = r"model.gguf: tensor blk.*\[3\] at offset 200000"
    with pytest.raises(ModelFileError, match=wanted) as error:
        fetch(file, 200_000, 60_000)
    assert str(SIZE) in str(error.value) and str(left) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unlinked_file_is_still_read(path):
    data = path.read_bytes()
    file = ModelFile(path)
    path.unlink()
    assert fetch(file, 5000, 9000) == data[5000:14_000]


@pytest.mark.skipif(not LINUX, reason="reads by preadv")
def test_input_output_error_names_tensor_and_offset(path, monkeypatch):
    file = ModelFile(path)

    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(ModelFileError, match=r"tensor blk.*\[3\] at offset 8192.*EIO.*disk"):
        fetch(file, 8200, 100)


@pytest.mark.skipif(not LINUX, reason="reads by preadv")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [PAGE, 3 * PAGE + 512, 40_000])
def test_short_reads_go_on_where_they_stopped(path, monkeypatch, direct, most):
    file = ModelFile(path, direct)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:most]], at))
    assert fetch(file, 1000, 120_000) == path.read_bytes()[1000:121_000]
    assert file.short_reads > 0


@pytest.mark.skipif(not LINUX, reason="O_DIRECT")
def test_a_file_system_that_refuses_direct_opening(path, monkeypatch):
    plain = os.open

    def refusing(name, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(name, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    file = ModelFile(path)
    assert not file.direct
    assert fetch(file, 77, 5000) == path.read_bytes()[77:5077]


@pytest.mark.skipif(not LINUX, reason="O_DIRECT")
@pytest.mark.parametrize("refused_from", [0, 1])
def test_direct_reads_refused_at_the_probe_or_later(path, monkeypatch, refused_from):
    whole, calls = os.preadv, []

    def refusing(fd, views, at):
        calls.append(at)
        import fcntl

        if len(calls) > refused_from and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(fd, views, at)

    monkeypatch.setattr(os, "preadv", refusing)
    file = ModelFile(path)
    assert fetch(file, 4097, 10_000) == path.read_bytes()[4097:14_097]
    assert not file.direct


@pytest.mark.skipif(not LINUX, reason="sparse files")
def test_a_hole_is_found(tmp_path, path):
    sparse = tmp_path / "half.gguf"
    with open(sparse, "wb") as f:
        f.write(b"x" * 65_536)
        f.truncate(1 << 22)
    assert ModelFile(sparse).hole(0) == 65_536
    assert ModelFile(path).hole(0) is None


def test_memory_is_zero_aligned_and_given_back():
    memory = Memory(4 * PAGE)
    assert memory.address % PAGE == 0 and not any(memory.view)
    memory.view[:] = b"x" * (4 * PAGE)
    memory.give_back(PAGE, 2 * PAGE)
    if LINUX:
        assert bytes(memory.view[PAGE : 3 * PAGE]) == bytes(2 * PAGE)
    assert memory.view[0] == memory.view[4 * PAGE - 1] == ord("x")
    memory.close()
