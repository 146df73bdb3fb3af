"""offload/disk_forecast.py: hits by policy against hand answers, bandwidth, predicted rate."""

import numpy as np
import pytest
from tests.expert_files import model

from dali_gguf.offload.budget import Room
from dali_gguf.offload.disk_forecast import (
    POLICIES, forecast, measure_bandwidth, pool_hits, static_hits,
)
from dali_gguf.offload.memory_plan import Demand, MemoryPlan


def trace(*steps):
    """One layer, one expert a token."""
    return np.array(steps)[:, None, None]


def test_policies_on_a_trace_with_known_answers():
    ids = trace(0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 2)
    hits = pool_hits(ids, 4, 2, learn=0.0)
    assert set(hits) == set(POLICIES)
    assert hits["lru"] == pytest.approx(5 / 12)  # 0 stays, 1 and 2 drive each other out
    assert hits["belady"] == pytest.approx(7 / 12)  # and each second use of 1 or 2 can be kept
    assert hits["lru"] <= hits["lfu"] <= hits["belady"]


def test_static_learns_from_the_first_part():
    ids = trace(*[1, 1, 2, 1], *[1, 1, 3, 2, 1, 1])
    assert pool_hits(ids, 4, 1)["static"] == pytest.approx(4 / 6)


def test_belady_is_never_worse():
    rng = np.random.default_rng(0)
    popular = rng.dirichlet(np.full(32, 0.3))
    ids = np.argsort(-(np.log(popular) + rng.gumbel(size=(120, 3, 32))), axis=2)[:, :, :4]
    hits = pool_hits(ids, 32, 40)
    assert all(hits["belady"] >= hits[name] - 1e-9 for name in POLICIES)
    assert hits["decayed"] > 0.5


def test_static_hits_of_counts():
    counts = np.array([[8, 1, 1, 0], [4, 4, 1, 1]])
    assert static_hits(counts, 3 / 8) == pytest.approx((0.8 + 0.4 + 0.4) / 2)
    assert static_hits(counts, 1.0) == pytest.approx(1.0)


def test_the_forecast_adds_up(tmp_path):
    layers = model(tmp_path)
    tensors = {}
    for layer, experts in layers.items():
        for role, ones in (("gate", experts.gate), ("up", experts.up), ("down", experts.down)):
            for e, t in enumerate(ones):
                tensors[f"blk.{layer}.ffn_{role}.{e}.weight"] = t
    total = sum(t.nbytes for t in tensors.values())
    plan = MemoryPlan(Demand(total, 0, 0, 0), Room(total, "--ram"), True, total // 4)
    f = forecast(plan, tensors, 8, 2, bandwidth=1e6)
    assert f.hit_rate == pytest.approx(0.25, abs=0.01)
    assert f.expert_bytes_per_token == total // 4
    assert f.rate == pytest.approx(1e6 / (total / 4 * 0.75), rel=0.01)
    slow = forecast(plan, tensors, 8, 2, bandwidth=1e6, compute_seconds=10.0)
    assert slow.rate == pytest.approx(0.1)
    assert any("worst case" in line for line in f.lines())
    assert measure_bandwidth(tensors, seconds=0.05) > 0
