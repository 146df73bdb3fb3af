import contextlib
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.offload import transfer  # noqa: E402
from dali_gguf.offload.direct_io import Memory  # noqa: E402
from dali_gguf.offload.transfer import DEMAND, DROPPED, FILL, PREFETCH, Copy, Link  # noqa: E402


@pytest.fixture
def link():
    one = Link(torch.device("cpu"))
    yield one
    one.close()


@pytest.fixture
def gate(link):
    """A link that stands still until the gate opens; .order: experts in the order of copying."""
    gate, plain = threading.Event(), link._copy
    gate.order = []

    def copy(one):
        gate.wait()
        gate.order.append(one.expert)
        plain(one)

    link._copy = copy
    yield gate
    gate.set()


def copy_of(expert, kind=DEMAND, size=1000):
    source = np.random.default_rng(expert).integers(0, 256, size, dtype=np.uint8)
    target = torch.zeros(size, dtype=torch.uint8)
    return Copy(0, expert, 0, kind, [(source[:400], target[:400]), (source[400:], target[400:])])


def started(copy):
    while copy.state == 0:
        time.sleep(0.001)


def test_bytes_arrive(link):
    copies = [copy_of(i) for i in range(5)]
    link.offer(copies)
    for copy in copies:
        link.wait(copy)
        assert link.arrived(copy) and copy.us > 0
        for source, target in copy.parts:
            assert np.array_equal(source, target.numpy())
    assert link.copies == 5 and link.bytes == 5000 and link.busy_us > 0


def test_demand_goes_first_and_guesses_can_be_dropped(link, gate):
    first, fill, guess, other, demand = (
        copy_of(i, kind) for i, kind in enumerate((DEMAND, FILL, PREFETCH, PREFETCH, DEMAND))
    )
    link.offer([first])
    started(first)
    link.offer([fill, guess, other])
    link.offer([demand])
    assert link.waiting() == 4 and link.copying
    assert link.drop([guess, first]) == [guess] and guess.state == DROPPED
    gate.set()
    link.wait(other)
    assert gate.order == [0, 4, 1, 3]
    assert not guess.parts[0][1].any() and link.waiting() == 0


def test_an_error_reaches_who_waits_and_the_link_goes_on(link):
    bad, good = copy_of(1), copy_of(2)
    bad.parts.append((np.zeros(3, np.uint8), torch.zeros(5, dtype=torch.uint8)))
    link.offer([bad, good])
    with pytest.raises(ValueError):
        link.wait(bad)
    link.wait(good)


def test_closing_with_work_left(gate, link):
    link.offer([copy_of(1), copy_of(2)])
    gate.set()
    link.close()
    assert not link._thread.is_alive()
    link._thread = threading.Thread(target=lambda: None)
    link._thread.start()


def test_demand_within_an_offer_of_both_kinds_goes_first(link, gate):
    first, demand, guess, other = (
        copy_of(i, kind) for i, kind in enumerate((DEMAND, DEMAND, PREFETCH, DEMAND))
    )
    link.offer([first])
    started(first)
    link.offer([demand])
    link.offer([guess, other])
    gate.set()
    link.wait(guess)
    assert gate.order == [0, 1, 3, 2]


class Cuda:
    """torch as transfer.py uses it on a card. Its runtime gives `code` to every request to lock
    memory, and keeps an error for the next launch."""

    uint8, from_numpy = torch.uint8, staticmethod(torch.from_numpy)

    def __init__(self, code):
        self.cuda = self
        self.code, self.error, self.locked, self.calls = code, 0, [], []
        self.device = self.stream = lambda *_: contextlib.nullcontext()

    def cudart(self):
        return self

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.error = self.code
        self.locked += [address] * (self.code == 0)
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        self.locked.remove(address)
        return 0

    def empty(self, shape, dtype, pin_memory):
        return torch.empty(shape, dtype=dtype)

    def ones(self, *_, device):
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")

    def synchronize(self, *_):
        self.calls.append("synchronize")

    def Stream(self, device):  # noqa: N802
        return self

    def Event(self, enable_timing=False):  # noqa: N802
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, query=lambda: True)


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_the_driver_does_not_lock_goes_through_the_ring(monkeypatch, code):
    cuda = Cuda(code)
    monkeypatch.setattr(transfer, "torch", cuda)
    staging = SimpleNamespace(memory=Memory(8192))
    link, ringed = Link(SimpleNamespace(type="cuda"), staging), []
    piece = link._piece
    link._piece = lambda *parts: (ringed.append(parts), piece(*parts))
    assert cuda.error == 0, "left for a launch that has nothing to do with it"
    assert cuda.locked == [staging.memory.address] * (code == 0)
    copy = copy_of(1)
    copy.from_disk = True
    link.offer([copy])
    copy.issued.wait()
    assert copy.error is None and len(ringed) == (2 if code else 0)
    assert all(np.array_equal(source, target.numpy()) for source, target in copy.parts)
    link.close()
    link.close()
    assert not cuda.locked and "synchronize" in cuda.calls
