"""offload/staging.py and its way through the link: right bytes, buffers, errors."""

import errno
import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.errors import MemoryBudgetError, ModelFileError  # noqa: E402
from dali_gguf.offload import native_loads  # noqa: E402
from dali_gguf.offload.ram_tier import RamTier  # noqa: E402
from dali_gguf.offload.staging import buffers_for, staging_bytes  # noqa: E402
from dali_gguf.offload.transfer import DEMAND, PREFETCH, Copy, Link  # noqa: E402
from tests.expert_files import FORMS, model  # noqa: E402

N = 8


@pytest.fixture(autouse=True, params=["compiled", "python"])
def readers(request, monkeypatch):
    """Both kinds of reader threads."""
    if request.param == "python":
        monkeypatch.setattr(native_loads, "NATIVE", False)


@pytest.fixture
def open_tier():
    """open_tier(layers): a tier with 8 slots, and a link on the CPU."""
    opened = []

    def make(layers):
        ram = RamTier(layers, 8 * 40960, 2)
        opened.append((Link(torch.device("cpu"), ram.staging), ram))
        return opened[-1]

    yield make
    for link, ram in opened:
        link.close()
        ram.close()


def copy_of(ram, layers, layer, e, kind=DEMAND):
    """A copy whose mapped sources are not the file's bytes."""
    sizes = [t.nbytes for t in layers[layer].matrices(e)]
    parts = [(np.zeros(n, np.uint8), torch.zeros(n, dtype=torch.uint8)) for n in sizes]
    return Copy(0, e, 0, kind, parts, None, ram.key(layer, e))


def arrived_whole(link, copy, layers, layer):
    link.wait(copy)
    wanted = [t.data.tobytes() for t in layers[layer].matrices(copy.expert)]
    assert [target.numpy().tobytes() for _, target in copy.parts] == wanted


def hold(ram, layer, ids):
    """Brings experts into the arena."""
    for _ in ram.arena.need(layer, np.array(ids), np.ones(len(ids), np.int64)):
        pass


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shards", [1, 3])
def test_right_bytes_from_ram_and_from_disk(tmp_path, open_tier, form, shards):
    layers = model(tmp_path, form=form, shards=shards)
    link, ram = open_tier(layers)
    hold(ram, 1, [2, 5])
    copies = {(i, e): copy_of(ram, layers, i, e) for i in layers for e in range(N)}
    link.offer(list(copies.values()))
    for (layer, e), copy in copies.items():
        arrived_whole(link, copy, layers, layer)
        assert copy.from_disk == ((layer, e) not in ((1, 2), (1, 5)))
    assert len(ram.staging._free) == buffers_for(1) and not ram.staging._place


def test_reads_start_ahead_and_leave_a_buffer(tmp_path, open_tier):
    layers = model(tmp_path)
    link, ram = open_tier(layers)
    hold(ram, 0, [0])
    keys = [ram.key(0, e) for e in range(N)]
    ram.staging.read_ahead(keys)
    assert list(ram.staging._place) == keys[1:4] and len(ram.staging._free) == 1
    copies = [copy_of(ram, layers, 0, e) for e in (7, 2, 1, 3)]
    link.offer(copies)
    for copy in copies:
        arrived_whole(link, copy, layers, 0)


def test_an_expert_that_came_to_ram_after_its_read_began_gives_its_buffer_back(tmp_path, open_tier):
    layers = model(tmp_path)
    link, ram = open_tier(layers)
    ram.staging.read_ahead([ram.key(0, 3)])
    hold(ram, 0, [3])
    copy = copy_of(ram, layers, 0, 3, PREFETCH)
    link.offer([copy])
    arrived_whole(link, copy, layers, 0)
    assert copy.from_disk and not ram.staging._place


def test_closing_waits_for_reads_that_nobody_wants(tmp_path, open_tier):
    layers = model(tmp_path)
    _, ram = open_tier(layers)
    ram.staging.read_ahead([ram.key(2, e) for e in range(N)])


def test_an_arena_that_is_too_small_leaves_no_threads(tmp_path):
    layers = model(tmp_path)
    with pytest.raises(MemoryBudgetError, match="experts would get"):
        RamTier(layers, 40960, 4)
    assert not [t for t in threading.enumerate() if t.name.startswith("disk-")]


def test_closed_twice(tmp_path, open_tier):
    link, ram = open_tier(model(tmp_path))
    hold(ram, 1, [2])
    for _ in range(2):  # and a third time by open_tier
        link.close()
        ram.close()


def test_errors_name_file_tensor_and_offset(tmp_path, open_tier, monkeypatch):
    layers = model(tmp_path)
    link, ram = open_tier(layers)
    path = tmp_path / "model-0.gguf"
    os.truncate(path, layers[3].up[6].offset + 10)
    bad, good = copy_of(ram, layers, 3, 6), copy_of(ram, layers, 0, 1)
    link.offer([bad, good])
    with pytest.raises(ModelFileError, match=r"model-0.gguf: tensor blk.3.ffn_(up|down)\S+ at off"):
        link.wait(bad)
    arrived_whole(link, good, layers, 0)
    os.truncate(path, 0)
    monkeypatch.setattr(os, "preadv", _io_error)
    broken = copy_of(ram, layers, 0, 2)
    link.offer([broken])
    with pytest.raises(ModelFileError, match=r"blk.0.ffn_\S+ at offset \d+ cannot be read \(EIO"):
        link.wait(broken)
    assert len(ram.staging._free) == buffers_for(1)


def _io_error(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_buffers_for_small_and_large_experts():
    assert buffers_for(1 << 20) == 4 and buffers_for(20 << 20) == 3 and buffers_for(1 << 30) == 2
    assert staging_bytes(4097) == (8 << 20) + 4 * 8192


def test_the_budget_covers_the_buffers_of_smaller_experts_too():
    for slot in np.linspace(4096, 80 << 20, 500).astype(int) // 4096 * 4096:
        for more in (0, 1, 6 * 4096):  # the plan knows only about how large a slot will be
            assert staging_bytes(slot + more) >= (8 << 20) + buffers_for(slot) * slot
