"""Event simulation: the hand case of two layers, conservation, and what policies must not lose."""

import numpy as np
import pytest

from dali_gguf.offload import event_sim, event_state, hardware_profile, simulate, synthetic
from dali_gguf.offload import trace as traces
from dali_gguf.offload.simulate import Policy, Setting

C, G = np.array([0.0, 60.0]), np.array([0.0, 10.0])


def two_layers(t=80.0, r=1.0, prefetch=0, gap=False):
    """Two layers, one miss in each, attention 100, c 60, g 10."""
    run = event_state.Run(
        placement=5,
        place_margin=0.0,
        cache=0,
        decay=1.0,
        window=1,
        most=1,
        hysteresis=1.0,
        cache_margin=0.0,
        most_fills=0,
        prefetch=prefetch,
        gap=gap,
        room=0.8,
        t=t,
        r=r,
        plan_r=r,
        h_cpu=0.0,
        attention=100.0,
        routing=0.0,
        head=0.0,
        predict=0.0,
        log_step=0,
    )
    ids = np.array([[[1], [1]]], np.int16)
    state = event_state.new_state(np.array([[1, 0], [1, 0]]), np.zeros((2, 2)))
    event_sim.simulate(run, state, ids, ids, C, G, np.zeros(1))
    return state


@pytest.mark.parametrize(
    ("settings", "total", "useful"),
    [
        ({}, 320, 0),
        ({"prefetch": 1}, 270, 1),
        ({"prefetch": 1, "r": 0.5}, 310, 1),
        ({"prefetch": 1, "gap": True}, 270, 1),
        ({"prefetch": 1, "gap": True, "r": 0.5}, 270, 1),
        ({"prefetch": 1, "gap": True, "t": 300.0}, 320, 0),
    ],
    ids=["none", "at routing", "slowed", "in the gap", "in the gap, slowed", "does not fit"],
)
def test_hand_case_of_two_layers(settings, total, useful):
    state = two_layers(**settings)
    found = dict(zip(event_state.TOTALS, state.totals))
    assert (found["time"], found["useful"]) == (total, useful)
    assert found["uses"] == 2 and found["hits"] == 0


def test_log_has_every_part():
    state = two_layers(prefetch=1, gap=True)
    log = state.log[: int(state.at[event_state.N_LOG])]
    kinds = [int(k) for k in log[:, 0]]
    assert kinds.count(event_state.LOG_ATTENTION) == 2 and event_state.LOG_PREFETCH in kinds
    assert (log[:, 3] > log[:, 2]).all()


@pytest.fixture(scope="module")
def made():
    """(calibration counts, ids [S, L, B A], predicted, workload batch) of made-up routing."""
    trace, predicted = synthetic.qwen3_like(3, 16, 48, n_expert=32, n_used=4)
    first, rest = traces.select(trace, range(8)), traces.select(trace, range(8, 16))
    order = traces.decode_order(rest, 8)
    predicted = predicted[trace.starts[8] :]
    return first.counts(), traces.step_ids(rest.ids, order), traces.step_ids(predicted, order)


def run_all(made, name, share=0.4, prefill=False):
    counts, ids, predicted = made
    setting = Setting(
        hardware_profile.hardware(name), hardware_profile.shape("qwen3-30b"), share, 8, prefill
    )
    return {
        p.name: simulate.simulate(p, setting, ids, predicted, counts) for p in simulate.policies()
    }


@pytest.mark.parametrize("name", hardware_profile.names())
def test_ours_is_not_slower_than_static(made, name):
    found = run_all(made, name)
    ours = found["+ prefetch residual"].tokens_per_s
    assert ours >= 0.99 * found["static-hot"].tokens_per_s
    assert ours > found["static-layers"].tokens_per_s
    for r in found.values():
        assert 0 <= r.hit_rate <= 1 and 0 <= r.link_share <= 1.001
        assert r.prefetch_accuracy + r.prefetch_late <= 1 + 1e-9


def test_everything_resident_needs_no_copy(made):
    for name, r in run_all(made, "rtx3060-12g", share=1.0).items():
        assert r.hit_rate == 1 and r.gigabytes_per_step == 0, name


def test_simulation_is_repeatable(made):
    first, second = (run_all(made, "rtx4090")["+ prefetch residual"] for _ in range(2))
    assert first.tokens_per_s == second.tokens_per_s
