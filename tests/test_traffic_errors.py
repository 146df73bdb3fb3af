"""Copies that fail: every slot is in one place afterwards, and no expert has another one's bytes."""

import numpy as np
import pytest

pytest.importorskip("torch")

from dali_gguf.offload.cache import Swap  # noqa: E402
from dali_gguf.offload.seating import reseat  # noqa: E402
from tests.test_hybrid_scheduler import N_EXPERT, rig  # noqa: E402, F401


def failing(traffic, monkeypatch, expert):
    """Copies of one expert fail from now on."""
    copy = traffic.link._copy

    def fails(one):
        if one.expert == expert:
            raise OSError("the bus is gone")
        copy(one)

    monkeypatch.setattr(traffic.link, "_copy", fails)


def all_slots(traffic):
    free = sum(len(queue) for queue in traffic.slots.free.values())
    return free + int((traffic.slots.place >= 0).sum())


def test_a_fill_that_fails_gives_its_slot_back(rig, monkeypatch):
    traffic = rig().scheduler.traffic
    before, resident = all_slots(traffic), traffic.cache.resident[1]
    load, evict = int(np.flatnonzero(resident == 0)[0]), int(np.flatnonzero(resident)[0])
    failing(traffic, monkeypatch, load)
    traffic.fill(1, [Swap(load, evict, 1.0, False)])
    traffic.coming[1][load].issued.wait()
    with pytest.raises(OSError, match="the bus is gone"):
        traffic.settle()
    traffic.settle()
    assert all_slots(traffic) == before and not traffic.coming[1] and resident[evict]


def test_new_seats_that_fail_leave_nobody_with_other_bytes(rig, monkeypatch):
    r = rig()
    traffic, cache = r.scheduler.traffic, r.scheduler.cache
    before = all_slots(traffic)
    cache.score[:] = np.arange(N_EXPERT)
    failing(traffic, monkeypatch, N_EXPERT - 1)
    with pytest.raises(OSError, match="the bus is gone"):
        reseat(traffic)
    assert not cache.resident[:, N_EXPERT - 1].any() and cache.resident[:, N_EXPERT - 2].all()
    assert all_slots(traffic) == before
    assert np.array_equal(traffic.slots.place >= 0, cache.resident.astype(bool))
    monkeypatch.undo()
    assert r.run(3) < 1e-4


def test_every_copy_is_told(rig):
    r = rig(placement="all-gpu", prefetch="none")
    for steps in range(1, 6):
        r.run(steps)
        traffic = r.scheduler.traffic
        for copy in traffic._timed:
            copy.issued.wait()
        assert r.scheduler.figures()["total"]["from_ram"] == traffic.link.copies > 0
