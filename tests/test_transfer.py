import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

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
