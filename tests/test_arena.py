"""offload/arena.py and slots.py: right bytes in every form, who stays, hints, failures."""

import ctypes
import os

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.errors import MemoryBudgetError, ModelFileError
from dali_gguf.offload import native_loads
from dali_gguf.offload.arena import ExpertArena
from dali_gguf.offload.direct_io import ModelFile
from dali_gguf.offload.layout import lay_out, layer_layouts, slot_sizes
from dali_gguf.offload.native_loads import NativeLoads
from dali_gguf.offload.native_readers import MOST_GUESSES
from dali_gguf.offload.slots import RING, check_arena, smallest_arena
from tests.expert_files import FORMS, model

N = 8


@pytest.fixture(autouse=True, params=["compiled", "python"])
def readers(request, monkeypatch):
    """Both kinds of reader threads."""
    if request.param == "python":
        monkeypatch.setattr(native_loads, "NATIVE", False)


def never_idle(arena):
    """The disk has no time for guesses."""
    if isinstance(arena.loads, NativeLoads):
        arena.loads._record[MOST_GUESSES] = 0
    else:
        arena.loads.readers.guess = lambda reads: None


def ones(ids):
    return np.ones(len(ids), np.int64)


def arena_for(layers, slots, **options):
    """An arena with that many slots (of the largest size)."""
    layouts = {layer: layer_layouts(experts) for layer, experts in layers.items()}
    return ExpertArena(layers, slots * max(slot_sizes(layers, layouts).values()), **options)


def matrices_in(arena, layer, e, experts):
    """The bytes of gate, up and down that the arena's addresses point to."""
    places = arena.addresses(layer)[:, e].tolist()
    return [ctypes.string_at(at, t.nbytes) for at, t in zip(places, experts.matrices(e))]


def take(arena, layers, layer, ids, frozen=False):
    """Runs a need() to its end, comparing every byte; returns the arrivals in order."""
    order = []
    for ids_here in arena.need(layer, np.array(ids), ones(ids), frozen):
        for e in ids_here.tolist():
            want = [t.data.tobytes() for t in layers[layer].matrices(e)]
            assert matrices_in(arena, layer, e, layers[layer]) == want
            order.append(e)
    assert sorted(order) == sorted(ids)
    return order


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_every_form_in_every_split(tmp_path, form, shards, direct):
    layers = model(tmp_path, form=form, shards=shards, odd_down=Q.F16)
    arena = arena_for(layers, 12, direct=direct)
    rng = np.random.default_rng(0)
    for _ in range(40):
        for layer in layers:
            take(arena, layers, layer, rng.choice(N, 2, replace=False).tolist())
    s = arena.stats()
    assert s.uses == 40 * 4 * 2 == s.hits + s.misses and s.misses > 0 < s.hits
    assert s.evictions >= s.misses - s.slots and s.short_reads == 0
    arena.close()


def test_ranges_that_touch_are_read_as_one(tmp_path):
    fused = lay_out(model(tmp_path, form="fused")[0].matrices(3))
    assert len(fused.extents) == 2
    assert len(lay_out(model(tmp_path, form="merged")[0].matrices(3)).extents) == 3


def test_residents_come_first(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 8)
    take(arena, layers, 0, [5, 6])
    assert set(take(arena, layers, 0, [1, 5, 2, 6])[:2]) == {5, 6}
    assert arena.resident(0).nonzero()[0].tolist() == [1, 2, 5, 6]
    arena.close()


def test_the_least_used_expert_of_all_layers_goes(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 4)
    for _ in range(3):
        take(arena, layers, 0, [0, 1])
    take(arena, layers, 1, [7])
    take(arena, layers, 2, [3])
    take(arena, layers, 3, [2])  # layer 1's expert was used once, and before layer 2's
    assert arena.resident(0)[[0, 1]].all()
    assert not arena.resident(1).any()
    arena.close()


def test_a_long_prefill_leaves_the_residents_alone(tmp_path):
    layers = model(tmp_path, n_expert=40)
    arena = arena_for(layers, 60)
    favourites = list(range(10))
    for _ in range(3):
        for layer in layers:
            take(arena, layers, layer, favourites)
    before = arena.stats()
    for layer in layers:
        take(arena, layers, layer, list(range(40)), frozen=True)
    kept = sum(int(arena.resident(layer)[favourites].sum()) for layer in layers)
    assert kept >= 40 - RING
    s = arena.stats() - before
    assert s.misses <= 4 * 30 + RING and s.hits >= 40 - RING
    arena.close()


def test_more_experts_than_slots_pass_through(tmp_path):
    layers = model(tmp_path, n_expert=40)
    arena = arena_for(layers, 5)
    for layer in layers:
        take(arena, layers, layer, list(range(40)), frozen=True)
        take(arena, layers, layer, list(range(40)))
    arena.close()


def test_prefill_goes_on_when_hints_hold_every_slot(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 4)
    take(arena, layers, 0, [0, 1])
    arena.hint(2, np.array([0, 1, 2, 3]))
    arena.wait_idle()
    arena.hint(2, np.array([0, 1, 2, 3]))
    take(arena, layers, 1, [4, 5, 6], frozen=True)
    arena.close()


def test_hints_used_wasted_cancelled(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 16)
    take(arena, layers, 0, [0])
    assert arena.hint(1, np.array([2, 3])) == 2
    assert arena.hint(1, np.array([2, 3])) == 0
    arena.wait_idle()
    take(arena, layers, 1, [3, 4])
    s = arena.stats()
    assert (s.hinted, s.hints_used, s.hints_wasted, s.hints_cancelled, s.late) == (2, 1, 1, 0, 0)
    assert (s.hits, s.misses) == (1, 2)
    assert arena.resident(1)[2], "a wasted guess stays until its slot is wanted"
    arena.close()


def test_guesses_still_in_the_queue_are_promoted_or_cancelled(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 16)
    take(arena, layers, 0, [0])
    never_idle(arena)
    arena.hint(1, np.array([2, 3]))
    assert take(arena, layers, 1, [3]) == [3]
    s = arena.stats()
    assert (s.late, s.misses, s.hits, s.hints_used, s.hints_cancelled) == (1, 1, 0, 1, 1)
    assert len(arena.slots.classes[0].free) == 16 - 2
    arena.close()


def test_fill_takes_the_most_used_and_gives_way(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 6)
    counts = np.zeros((4, N))
    counts[:, 5], counts[:2, 6], counts[3, 1] = 100, 50, 3
    assert arena.fill(counts, n_used=2) == 6
    arena.wait_idle()
    assert all(arena.resident(layer)[5] for layer in layers)
    assert arena.resident(0)[6] and arena.resident(1)[6]
    take(arena, layers, 2, [0, 1])
    assert arena.stats().hits == 0 and arena.resident(0)[5], "seeded scores protect the favourites"
    arena.close()


def test_fill_without_counts_goes_round_the_layers(tmp_path):
    layers = model(tmp_path, odd_down=Q.F16)
    arena = arena_for(layers, 14)
    arena.fill()
    arena.wait_idle()
    held = [int(arena.resident(layer).sum()) for layer in layers]
    assert max(held) - min(held) <= 1
    arena.close()


def test_a_fill_that_has_not_begun_gives_its_slot_away(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 6)
    never_idle(arena)
    assert arena.fill() == 6
    take(arena, layers, 3, [6, 7])
    assert arena.stats().filled == 4
    arena.close()


def test_a_cut_file_stops_the_step_that_needs_it(tmp_path):
    layers = model(tmp_path, n_layer=2)
    arena = arena_for(layers, 6)
    take(arena, layers, 0, [0, 1])
    os.truncate(tmp_path / "model-0.gguf", layers[1].up[4].offset + 10)
    arena.hint(1, np.array([5]))
    arena.wait_idle()
    assert arena.stats().failed_guesses == 1 and not arena.resident(1)[5]
    with pytest.raises(ModelFileError, match=r"model-0.gguf: tensor blk.1.ffn_(up|down)_exps"):
        take(arena, layers, 1, [5])
    take(arena, layers, 0, [0, 2])  # what is whole goes on
    arena.close()


def test_a_shard_that_is_gone_leaves_no_other_open(tmp_path, monkeypatch):
    opened, layers = [], model(tmp_path, shards=3)

    class Watched(ModelFile):
        def __init__(self, path, direct):
            super().__init__(path, direct)
            opened.append(self)

    monkeypatch.setattr(native_loads, "ModelFile", Watched)
    os.unlink(tmp_path / "model-2.gguf")
    with pytest.raises(ModelFileError, match="model-2.gguf: cannot be opened"):
        arena_for(layers, 6)
    assert [file.descriptor for file in opened] == [-1, -1]


def test_shrinking_gives_up_the_least_used_and_growing_adds_slots(tmp_path):
    layers = model(tmp_path, odd_down=Q.F16)
    arena = arena_for(layers, 24, growth=0.5)
    start = arena.slots.count
    for _ in range(3):
        for layer in layers:
            take(arena, layers, layer, [1, 2])
    take(arena, layers, 0, [3, 4])
    arena.fill()
    arena.wait_idle()
    arena.resize(arena.slots.nbytes // 2)
    assert arena.slots.count == pytest.approx(start / 2, abs=2)
    assert all(arena.resident(layer)[[1, 2]].all() for layer in layers)
    arena.resize(10 * arena.slots.nbytes)
    assert arena.slots.count == 32 and not arena.slots.full, "every expert has a slot"
    for layer in layers:
        take(arena, layers, layer, [0, 3, 5, 7])
    arena.close()


def test_an_abandoned_step_does_no_harm(tmp_path):
    layers = model(tmp_path)
    arena = arena_for(layers, 8)
    arena.need(0, np.array([0, 1, 2]), ones("abc"))
    for _ in range(3):
        for layer in layers:
            take(arena, layers, layer, [1, 2, 3])
    arena.close()


def test_too_small_is_refused_with_the_least_that_works():
    sizes = np.array([1 << 20, 1 << 20, 2 << 20])
    least = smallest_arena(sizes, 32, 8)
    check_arena(sizes, 32, 8, least)
    with pytest.raises(MemoryBudgetError, match="8 at a time"):
        check_arena(sizes, 32, 8, least - 1)


def test_random_work_keeps_the_books(tmp_path):
    layers = model(tmp_path, n_expert=24, odd_down=Q.F16)
    arena = arena_for(layers, 30)
    arena.fill()
    rng = np.random.default_rng(3)
    for step in range(60):
        frozen = step % 10 == 9
        for layer in layers:
            count = int(rng.integers(1, 25 if frozen else 6))
            take(arena, layers, layer, rng.choice(24, count, replace=False).tolist(), frozen)
            following = (layer + 1) % 4
            arena.hint(following, rng.choice(24, 2, replace=False), following == 0, frozen)
    arena.wait_idle()
    s = arena.stats()
    assert s.hits + s.misses + s.late == s.uses
    assert s.hints_used + s.hints_wasted + s.hints_cancelled <= s.hinted
    for c in arena.slots.classes:
        keys = slice(c.first_key, c.first_key + c.pool.score.size)
        places = arena._place[keys][arena.state[keys] > 0].tolist() + c.free
        assert len(set(places)) == len(places) == c.count
        assert np.array_equal(arena.state[keys] == 2, c.pool.resident == 1)
    arena.close()
