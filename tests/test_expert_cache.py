"""Expert caches: hand answers, exact decay, swaps; the pool over all layers."""

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.offload import cache
from dali_gguf.offload.cache import CacheSettings, ExpertCache, hit_rates
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.slot_pool import SlotPool

COSTS = Costs(np.array([0.0, 80.0]), np.array([0.0, 10.0]), 120.0)


def steps(uses, n_expert):
    """Workload [S, 1, E] of one layer from lists of used experts."""
    return np.array([[np.bincount(u, minlength=n_expert)] for u in uses])


def rates(uses, resident, settings):
    out = hit_rates(steps(uses, len(resident)), np.array([resident], np.uint8), settings)
    n = steps(uses, len(resident)).astype(bool).sum()
    return round(out["by_expert"] * n), round(out["fills_per_use"] * n)


def test_lru_and_belady_on_one_slot():
    uses = [[0], [1], [0], [2], [0]]
    assert rates(uses, [1, 0, 0], CacheSettings("lru"))[0] == 1
    assert rates(uses, [1, 0, 0], CacheSettings("belady")) == (3, 0)


@pytest.mark.parametrize(("margin", "hits"), [(0, 3), (1, 2), (1.6, 1)])
def test_margin_of_the_decayed_score(margin, hits):
    settings = CacheSettings("decayed", decay=0.5, hysteresis=1.0, margin=margin)
    assert rates([[0], [2], [2], [2]], [1, 1, 0], settings)[0] == hits


def test_window_counts_tokens_not_uses():
    uses = [[0, 0, 0, 1], [0, 1, 2], [0, 0, 0, 2]]
    window = CacheSettings("workload", window=2, most=1, hysteresis=1.0, margin=0.0)
    assert rates(uses, [0, 1, 0], window) == (3, 1)
    present = np.minimum(steps(uses, 3), 1)
    found = hit_rates(present, np.array([[0, 1, 0]], np.uint8), window)
    assert round(found["by_expert"] * 7) == 2 and found["fills_per_use"] == 0


def test_belady_is_never_beaten_by_expert():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(16) * 0.3)
    uses = [rng.choice(16, 2, replace=False, p=p) for _ in range(400)]
    resident = np.array([1] * 5 + [0] * 11)
    best = rates(uses, resident, CacheSettings("belady"))[0]
    found = {p: rates(uses, resident, cache.settings(p))[0] for p in cache.POLICIES}
    assert all(best >= hits for hits in found.values())
    assert found["decayed"] > found["static"]


@pytest.mark.parametrize("policy", cache.POLICIES)
def test_slots_never_change_in_number(policy):
    rng = np.random.default_rng(1)
    store = ExpertCache(
        np.eye(2, 12, dtype=np.uint8) + np.eye(2, 12, 4, dtype=np.uint8), cache.settings(policy)
    )
    for _ in range(200):
        for layer in range(2):
            workload = np.bincount(rng.integers(0, 12, 4), minlength=12)
            arrived = np.flatnonzero(workload)[:1]
            for swap in store.step(layer, workload, arrived, COSTS):
                assert not swap.adopted or store.resident[layer, swap.load]
                if not swap.adopted and store.started(layer, swap):
                    assert store.resident[layer].sum() == 1
                    store.finished(layer, swap)
            assert store.resident[layer].sum() == 2


def test_score_is_the_decayed_sum():
    store = ExpertCache(np.array([[1, 0, 0]], np.uint8), CacheSettings(decay=0.9, margin=1e9))
    by_hand, rng = np.zeros(3), np.random.default_rng(2)
    for _ in range(700):  # far enough to rescale
        workload = rng.integers(0, 3, 3)
        store.step(0, workload)
        by_hand = 0.9 * by_hand + workload
    assert store.score[0] / store.unit[0] == pytest.approx(by_hand)
    assert store.unit[0] < 1e13


def test_seed_and_value():
    store = ExpertCache(np.array([[1, 0]], np.uint8))
    store.seed(np.array([[1, 3]]), tokens_per_step=4)
    assert store.expected_uses(0, 1) == pytest.approx(3)
    swaps = store.step(0, np.array([1, 3]), costs=COSTS)
    assert [(s.load, s.evict, s.adopted) for s in swaps] == [(1, 0, False)]
    assert swaps[0].value_us == pytest.approx(2 * 70)
    assert store.resident.tolist() == [[1, 0]]  # until the copy starts


def test_adoption_is_free_and_frozen_keeps_still():
    store = ExpertCache(np.array([[1, 0, 0]], np.uint8))
    store.frozen = True
    assert store.step(0, np.array([0, 5, 0]), [1]) == []
    store.frozen = False
    swaps = store.step(0, np.array([0, 5, 0]), [1])
    assert swaps[0].adopted and store.resident.tolist() == [[0, 1, 0]]


def test_a_stale_fill_is_refused():
    store = ExpertCache(np.array([[1, 0, 0]], np.uint8), CacheSettings(margin=0.0))
    (swap,) = store.step(0, np.array([0, 9, 0]))
    store.resident[0] = [0, 0, 1]
    assert not store.started(0, swap)


def test_unknown_policy():
    with pytest.raises(InputError, match="'arc' is unknown: choose one of static, decayed"):
        cache.settings("arc")


def test_pool_victims_and_protection():
    pool = SlotPool(2, 4, capacity=5)
    pool.insert(pool.keys(0, [0, 1, 2]))
    pool.insert(pool.keys(1, [3]))
    pool.touch(0, np.array([0, 2]), np.array([3, 1]))
    pool.touch(1, np.array([3]), np.array([2]))
    assert pool.free == 1 and pool.victims(9).tolist() == [1, 2, 7, 0]
    pool.protect(pool.keys(0, [1]), steps=1)
    assert pool.victims(2).tolist() == [2, 7]
    pool.tick()
    assert pool.victims(1).tolist() == [2]
    pool.tick()
    assert pool.victims(1).tolist() == [1]
    pool.evict(pool.victims(1))
    assert pool.free == 2


def test_pool_half_life_and_rescaling():
    pool = SlotPool(1, 2, 2, half_life=16)
    pool.touch(0, np.array([0]), np.array([8]))
    for _ in range(16):
        pool.tick()
    assert pool.worth(0) == pytest.approx(4)
    pool.tick(tokens=16)
    assert pool.worth(0) == pytest.approx(2)
    for _ in range(20000):
        pool.tick()
        pool.touch(0, np.array([1]), np.array([1]))
    assert np.isfinite(pool.score).all() and pool.worth(1) == pytest.approx(1 / (1 - pool.decay))
    before = pool.score.copy()
    pool.frozen = True
    pool.tick()
    pool.touch(0, np.array([0]), np.array([5]))
    assert (pool.score == before).all()
