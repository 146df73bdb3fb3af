"""offload/disk_scheduler.py and disk_tier.py: a model that does not fit gives the same tokens."""

import os
from itertools import islice

import numpy as np
import pytest
from tests.arena_device import ArenaDevice
from tests.benchmarks.disk_model import TINY, Routing, write_model

from dali_gguf.engine import Engine
from dali_gguf.errors import MemoryBudgetError, ModelFileError
from dali_gguf.offload import budget, disk_tier
from dali_gguf.offload.disk_scheduler import DiskScheduler
from dali_gguf.offload.memory_plan import RUNTIME, SPARE
from dali_gguf.offload.memory_watch import LEAST_SPARE
from dali_gguf.sampler import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=-2)
ROOM_FOR = disk_tier.room_for
PROMPT = [300, 301, 17, 350, 400]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, TINY, Routing())
    return path


def limited(path, monkeypatch, part, **options):
    """An engine with room for that part of the experts."""
    monkeypatch.setattr(disk_tier, "room_for", ROOM_FOR)
    with Engine(path, n_ctx=128, device=ArenaDevice(), **options) as free:
        demand = free.memory.demand
    usable = demand.fixed + int(part * demand.experts)
    room = budget.Room(int(usable / (1 - SPARE)) + 1, budget.MACHINE)
    monkeypatch.setattr(disk_tier, "room_for", lambda ram: room)
    engine = Engine(path, n_ctx=128, device=ArenaDevice(), **options)
    monkeypatch.setattr(disk_tier, "room_for", lambda ram: budget.Room(LEAST_SPARE, "test"))
    return engine


def tokens(engine, n=48, prompt=PROMPT):
    return list(islice(engine.tokens(prompt, GREEDY), n))


@pytest.mark.parametrize("part", [0.45, 0.7, 0.95])
def test_same_tokens_with_any_part_in_memory(path, monkeypatch, part):
    with Engine(path, n_ctx=128, device=ArenaDevice()) as engine:
        expected = tokens(engine)
        assert not engine.memory.streams and engine.stats.disk is None
    with limited(path, monkeypatch, part) as engine:
        assert isinstance(engine.scheduler, DiskScheduler)
        assert tokens(engine) == expected
        s = engine.scheduler.disk_stats()
        assert s.misses > 0, "nothing was missed: the limit did not bind, so this tested nothing"
        assert s.hits + s.misses + s.late == s.uses and s.hits > 0
        assert s.arena_bytes <= engine.memory.arena_bytes
        assert engine.stats.disk.uses == 48 * TINY.n_layer * TINY.n_used
        assert "% hits of" in engine.stats.line() and engine.stats.as_dict()["disk"]["misses"] > 0


def test_long_prompts_give_the_same_logits(path, monkeypatch):
    ids = np.random.default_rng(0).integers(3, TINY.n_vocab, 100).tolist()
    with Engine(path, n_ctx=128, device=ArenaDevice(), n_batch=64) as engine:
        expected = engine.logits(ids)
    with limited(path, monkeypatch, 0.45, n_batch=64) as engine:
        assert np.array_equal(engine.logits(ids), expected)
        assert engine.scheduler.disk_stats().misses > 0


def test_guesses_change_nothing_but_the_time(path, monkeypatch):
    with Engine(path, n_ctx=128, device=ArenaDevice()) as engine:
        expected = tokens(engine, 90)
    with limited(path, monkeypatch, 0.6) as engine:
        monkeypatch.setattr(engine.scheduler.pays, "enabled", lambda name: True)
        assert tokens(engine, 90) == expected
        s = engine.scheduler.disk_stats()
        assert s.hinted > 0 and s.hints_used > 0
        assert s.hints_used + s.hints_wasted + s.hints_cancelled <= s.hinted


def test_memory_that_comes_and_goes_changes_nothing_but_the_slots(path, monkeypatch):
    with Engine(path, n_ctx=128, device=ArenaDevice()) as engine:
        expected = tokens(engine, 90)
    with limited(path, monkeypatch, 0.5) as engine:
        arena, left = engine.scheduler.arena, [400 << 20, 400 << 20, LEAST_SPARE - (1 << 20)]
        room = lambda ram: budget.Room(left.pop(0) if left else LEAST_SPARE, "test")  # noqa: E731
        monkeypatch.setattr(disk_tier, "room_for", room)
        planned, sizes, running = arena.slots.nbytes, [], engine.tokens(PROMPT, GREEDY)
        for token in expected:
            assert next(running) == token
            sizes.append(arena.slots.nbytes)
        assert max(sizes) > 1.2 * planned and sizes[-1] < planned
        engine.scheduler.watch.before_scan()
        assert arena.slots.nbytes <= planned


def test_counts_of_earlier_runs_fill_the_arena(path, monkeypatch):
    kept = path.with_name("model.dali.gguf")
    kept.unlink(missing_ok=True)
    with limited(path, monkeypatch, 0.5) as engine:
        assert engine.scheduler.counts.stored is None
        tokens(engine, 20)
    assert not kept.exists(), "too short a run to keep"
    engine = limited(path, monkeypatch, 0.5)
    tokens(engine, 80)
    close = engine.scheduler.arena.close
    monkeypatch.setattr(engine.scheduler.arena, "close", lambda: close() or [][0])
    with pytest.raises(IndexError):
        engine.close()
    assert kept.exists(), "kept whatever else goes wrong"
    with limited(path, monkeypatch, 0.5) as engine:
        counts = engine.scheduler.counts.stored
        assert counts.tokens >= 80 and (counts.counts.sum(1) == counts.tokens * TINY.n_used).all()
        arena = engine.scheduler.arena
        arena.wait_idle()
        assert all(arena.resident(i)[np.argmax(counts.counts[i])] for i in range(TINY.n_layer))
    kept.unlink()


def test_without_counts_the_first_token_has_the_disk_to_itself(path, monkeypatch):
    with limited(path, monkeypatch, 0.9) as engine:
        engine.forward([5], [0])
        assert engine.scheduler.disk_stats().filled == 0
        engine.forward([6], [1])
        engine.forward([7], [2])
        assert engine.scheduler.disk_stats().filled > 0


def test_a_file_cut_while_running_is_an_error_not_a_crash(path, monkeypatch, tmp_path):
    copy = tmp_path / "cut.gguf"
    copy.write_bytes(path.read_bytes())
    with limited(copy, monkeypatch, 0.45) as engine:
        running = engine.tokens(PROMPT, GREEDY)
        next(running)
        os.truncate(copy, 100_000)
        wanted = r"cut.gguf: tensor blk.\d+.ffn_\w+.weight\[\d+\] at offset"
        with pytest.raises(ModelFileError, match=wanted):
            list(running)


def test_the_compiled_kernels_give_the_same_bits(path, monkeypatch):
    ids = np.random.default_rng(1).integers(3, TINY.n_vocab, 40).tolist()
    with Engine(path, n_ctx=128) as engine:
        expected, text, demand = engine.logits(ids), tokens(engine), engine.memory.demand
    usable = demand.fixed + demand.experts // 2
    room = budget.Room(int(usable / (1 - SPARE)) + 1, budget.MACHINE)
    monkeypatch.setattr(disk_tier, "room_for", lambda ram: room)
    with Engine(path, n_ctx=128) as engine:
        assert np.array_equal(engine.logits(ids), expected)
        assert tokens(engine) == text
        s = engine.scheduler.disk_stats()
        assert s.misses > 0 and s.hits > 0


def test_too_little_memory_is_refused_with_the_budget_that_works(path):
    with pytest.raises(MemoryBudgetError, match=r"\d+M would work"):
        Engine(path, n_ctx=128, device=ArenaDevice(), ram=budget.resident() + RUNTIME)
    with pytest.raises(MemoryBudgetError, match="--ram"):
        Engine(path, n_ctx=128, device=ArenaDevice(), ram="1M")


def test_without_mapping_the_weights_are_read(path):
    with Engine(path, n_ctx=128, device=ArenaDevice(), mmap=False) as engine:
        assert len(tokens(engine, 3)) == 3
