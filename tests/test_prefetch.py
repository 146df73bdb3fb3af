"""Predictors: what they compute, learn and refuse."""

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.prefetch import (
    Predictor,
    RouterMap,
    count_top,
    fit_linear,
    linear_features,
    rank,
)

RNG = np.random.default_rng(0)
D, E, A = 12, 10, 2
WEIGHTS = {i: RNG.standard_normal((E, D)).astype(np.float32) for i in (1, 2, 4)}
ROUTERS = {i: RouterMap(w, A) for i, w in WEIGHTS.items()}


def hidden(n):
    return RNG.standard_normal((n, D)).astype(np.float32)


def top_counts(ranking):
    return np.bincount(np.argsort(-ranking, 1, kind="stable")[:, :A].ravel(), minlength=E)


def test_count_top():
    counts = np.zeros(4, np.int64)
    count_top(np.array([[1, 3, 3, 0], [9, 1, 2, 8]], np.float32), 2, counts)
    assert counts.tolist() == [1, 1, 1, 1]


def test_next_router_skips_dense_layers():
    h = hidden(5)
    predictor = Predictor("next-router", ROUTERS)
    assert (predictor.predict(2, h) == top_counts(h @ WEIGHTS[4].T)).all()
    assert predictor.predict(4, h) is None
    assert Predictor("none", ROUTERS).predict(1, h) is None


def test_residual_learns_the_mean_difference():
    predictor = Predictor("residual", ROUTERS)
    shift, seen = hidden(1)[0] * 3, []
    for n in (4, 7):
        h = hidden(n)
        noise = 0.1 * hidden(n)
        seen.append(shift + noise)
        predictor.learn(1, h)
        predictor.learn(2, h + seen[-1])
    assert predictor.mean[1] == pytest.approx(np.concatenate(seen).mean(0), abs=1e-5)
    h = hidden(6)
    assert (predictor.predict(1, h) == top_counts((h + predictor.mean[1]) @ WEIGHTS[2].T)).all()


@pytest.mark.parametrize("kind", ["residual", "next-router"])
def test_products_that_are_known_give_the_same_predictions(kind):
    """The mean learned from products alone against W (h + mean), from stored means on, over steps
    of other sizes and one in which the products were not known."""
    means = {1: hidden(1)[0], 2: hidden(1)[0]}
    known, plain = (Predictor(kind, ROUTERS, means=means) for _ in range(2))
    known.seen = dict.fromkeys(known.seen, 3)
    plain.seen = dict.fromkeys(plain.seen, 3)
    layers = sorted(WEIGHTS)
    for step in range(30):
        h = hidden(1 + step % 4)
        for layer, following in zip(layers, [*layers[1:], None]):
            own = h @ WEIGHTS[layer].T
            ahead = None if following is None else h @ WEIGHTS[following].T
            if step == 11:
                own = ahead = None
            known.learn(layer, h, own, ahead)
            plain.learn(layer, h)
            if following is not None:
                expected = plain.ranking(layer, h)
                assert known.ranking(layer, h, ahead) == pytest.approx(expected, abs=1e-4)
            h = h + 0.3 * hidden(len(h)) + 1


def test_linear_uses_the_token_before_and_falls_back():
    maps = {i: RNG.standard_normal((3 * D + 1, E)).astype(np.float32) for i in (1, 2)}
    predictor = Predictor("linear", ROUTERS, maps=maps)
    first, second = {i: hidden(2) for i in (1, 2)}, hidden(2)
    assert (predictor.predict(1, first[1]) == top_counts(first[1] @ WEIGHTS[2].T)).all()
    for i in (1, 2):
        predictor.learn(i, first[i])
    expected = linear_features(second, first[1], first[2]) @ maps[1]
    assert predictor.ranking(1, second) == pytest.approx(expected)  # predict, then learn
    predictor.learn(1, second)
    assert predictor.ranking(1, second) == pytest.approx(expected)  # or learn first
    long = hidden(5)
    shifted = (long + predictor.mean[1]) @ WEIGHTS[2].T
    assert predictor.ranking(1, long) == pytest.approx(shifted, abs=1e-4)
    with pytest.raises(InputError, match="needs a fitted map"):
        Predictor("linear", ROUTERS)


def test_fit_linear_recovers_a_map():
    x, m = RNG.standard_normal((400, 8)), RNG.standard_normal((8, 3))
    assert fit_linear(x, x @ m, ridge=1e-6) == pytest.approx(m, abs=1e-4)


def test_frequency_and_unknown():
    counts = np.zeros((3, E))
    counts[1, [3, 5]] = 7
    predicted = Predictor("frequency", ROUTERS, counts).predict(1, hidden(4))
    assert predicted[[3, 5]].tolist() == [4, 4] and predicted.sum() == 8
    assert Predictor("frequency", ROUTERS).predict(1, hidden(4)) is None
    with pytest.raises(InputError, match="'magic' is unknown: choose one of residual"):
        Predictor("magic", ROUTERS)


def test_choice_bias_ranks():
    router = RouterMap(
        WEIGHTS[2],
        A,
        bias=np.ones(E, np.float32),
        sigmoid=True,
        correction=np.eye(E, dtype=np.float32)[6] * 9,
    )
    assert (router.ranking(hidden(8)).argmax(1) == 6).all()
    soft = RouterMap(WEIGHTS[2], A, correction=np.zeros(E, np.float32))
    assert soft.ranking(hidden(3)).sum(1) == pytest.approx(1)


def test_rank_by_workload_and_worth():
    c, g = np.array([0.0, 50, 100, 150]), np.array([0.0, 60, 60, 60])
    costs = Costs(c, g, 120.0)
    predicted, resident = np.array([3, 1, 2, 0, 9]), np.array([0, 0, 0, 0, 1], np.uint8)
    assert rank(predicted, resident, costs) == [(0, 90.0), (2, 40.0)]  # 1 is cheaper on the CPU


@pytest.mark.parametrize("kind", ["residual", "next-router", "frequency"])
@pytest.mark.parametrize("bias", [False, True])
def test_worth_is_the_rank_of_the_prediction(kind, bias):
    """In one call where router products are known and nothing else changes the choice."""
    extra = RNG.standard_normal(E).astype(np.float32) if bias else None
    routers = {i: RouterMap(w, A, extra) for i, w in WEIGHTS.items()}
    counts = RNG.integers(0, 9, (3, E))
    predictor = Predictor(kind, routers, counts, means={1: hidden(1)[0], 2: hidden(1)[0]})
    costs = Costs(np.arange(20.0) * 50, np.arange(20.0) * 10, 120.0)
    for n in (1, 3, 8):
        h, resident = hidden(n), (RNG.random(E) < 0.4).astype(np.uint8)
        ahead = h @ WEIGHTS[2].T
        expected = [e for e, _ in rank(predictor.predict(1, h, ahead), resident, costs)]
        for most in (1, 2, E):
            assert predictor.worth(1, h, ahead, resident, costs, most) == expected[:most]
            assert predictor.worth(1, h, None, resident, costs, most) == expected[:most]
    assert expected


def test_nothing_is_worth_fetching_without_a_prediction():
    costs = Costs(np.arange(4.0), np.zeros(4), 1.0)
    nobody = np.zeros(E, np.uint8)
    for kind in ("none", "frequency"):
        assert Predictor(kind, ROUTERS).worth(1, hidden(2), None, nobody, costs, 2) == []
