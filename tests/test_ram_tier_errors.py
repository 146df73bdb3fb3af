"""Experts in three places, and a step that ends with an error or an interruption."""

import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.errors import ModelFileError  # noqa: E402
from dali_gguf.offload import seating  # noqa: E402
from tests.test_ram_tier import (  # noqa: E402, F401
    GREEDY, PROMPT, expected, limited, made_up_costs, path, slots_hold_the_file, tokens,
)  # fmt: skip


def test_a_file_cut_while_running_is_an_error_that_names_the_tensor(path, monkeypatch, tmp_path):
    copy = tmp_path / "cut.gguf"
    copy.write_bytes(path.read_bytes())
    with limited(copy, monkeypatch, placement="all-gpu", in_ram=0.3) as engine:
        running = engine.tokens(PROMPT, GREEDY)
        next(running)
        os.truncate(copy, 100_000)
        wanted = r"cut.gguf: tensor blk.\d+.ffn_\w+.weight\[\d+\] at offset"
        with pytest.raises(ModelFileError, match=wanted):
            list(running)
        assert engine.scheduler.disk_stats().uses == 0, "the arena read it, not the link"


def test_a_file_cut_while_slots_are_filled_leaves_no_threads(path, monkeypatch, tmp_path):
    copy, before = tmp_path / "cut.gguf", set(threading.enumerate())
    copy.write_bytes(path.read_bytes())
    fill_all = seating.fill_all

    def cut(traffic, resident):
        os.truncate(copy, 100_000)
        fill_all(traffic, resident)

    monkeypatch.setattr(seating, "fill_all", cut)
    with pytest.raises(ModelFileError, match="cut.gguf: tensor"):
        limited(copy, monkeypatch)
    left = {t.name for t in set(threading.enumerate()) - before}
    assert not {n for n in left if n.startswith(("disk-", "dali-"))}


def test_an_engine_closes_twice(path, monkeypatch):
    with limited(path, monkeypatch) as engine:
        tokens(engine, 2)
        engine.close()


def test_the_next_text_is_right_after_an_error(path, monkeypatch, expected):
    with limited(path, monkeypatch) as engine:
        real, calls = engine.device.compute, []

        def compute(*args):
            calls.append(args)
            if len(calls) % 40 == 0:
                raise KeyboardInterrupt
            return real(*args)

        slots = engine.scheduler.traffic.slots
        free = sum(map(len, slots.free.values()))
        for _ in range(3):
            monkeypatch.setattr(engine.device, "compute", compute)
            with pytest.raises(KeyboardInterrupt):
                tokens(engine)
            monkeypatch.setattr(engine.device, "compute", real)
            assert tokens(engine) == expected
        slots_hold_the_file(engine)
        everything_arrived(engine)
        assert sum(map(len, slots.free.values())) == free, "spare slots were lost"


def everything_arrived(engine):
    """Copies under way have ended, and their slots are resident or spare."""
    traffic = engine.scheduler.traffic
    for copies in (*traffic.coming, {i: c for i, c in enumerate(traffic._orphans)}):
        for copy in copies.values():
            copy.issued.wait()
    traffic.settle()
    for row in range(len(traffic.coming)):
        traffic.prepare(row)
        traffic.judge(row, np.zeros(engine.config.experts.n_expert, np.int64))
    traffic.settle()
