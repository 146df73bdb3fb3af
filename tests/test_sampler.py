"""Each step of the chain on logits one can follow, and draws against their probabilities."""

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.sampler import Sampler, SamplingParams, candidates, min_p, top_p


def log(*p):
    return np.log(np.array(p, np.float32))


def test_defaults_are_llama_cpps():
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.penalty_last_n) == (0.8, 40, 0.95, 0.05, 64)
    assert (p.repeat_penalty, p.presence_penalty, p.frequency_penalty, p.max_tokens) == (
        1,
        0,
        0,
        -1,
    )


def test_greedy_takes_the_lowest_id_of_equals():
    sampler = Sampler(SamplingParams(temperature=0), [])
    assert [sampler.sample(np.array([1, 3, 3, 2], np.float32)) for _ in range(5)] == [1] * 5


def test_candidates_are_sorted_and_stable():
    logits = np.array([0, 5, 1, 5, 5, -1], np.float32)
    assert candidates(logits, 2)[0].tolist() == [1, 3]
    assert candidates(logits, 4)[0].tolist() == [1, 3, 4, 2]
    assert (
        candidates(logits, 0)[0].tolist()
        == candidates(logits, 99)[0].tolist()
        == [1, 3, 4, 2, 0, 5]
    )


@pytest.mark.parametrize("n", [100, 640, 5000])
def test_candidates_of_a_large_vocabulary(n):
    rng = np.random.default_rng(n)
    for logits in (rng.standard_normal(n), rng.integers(0, 9, n), np.zeros(n)):
        expected = np.argsort(-logits, kind="stable")
        for k in (1, 7, 40):
            assert candidates(logits.astype(np.float32), k)[0].tolist() == expected[:k].tolist()


def test_top_p_keeps_the_one_that_crosses():
    assert len(top_p(log(0.5, 0.3, 0.1, 0.1), 0.79)) == 2
    assert len(top_p(log(0.5, 0.3, 0.1, 0.1), 0.81)) == 3
    assert len(top_p(log(0.5, 0.3, 0.2), 0.0)) == 1 and len(top_p(log(0.5, 0.5), 1.0)) == 2


def test_min_p_is_relative_to_the_best():
    assert len(min_p(log(0.5, 0.3, 0.06, 0.04), 0.1)) == 3
    assert len(min_p(log(0.5, 0.5), 0.0)) == 2 and len(min_p(log(0.6, 0.4), 5.0)) == 1


def test_penalties():
    params = SamplingParams(repeat_penalty=2, presence_penalty=1, frequency_penalty=0.5)
    sampler = Sampler(params, [0, 1, 1])
    assert sampler.penalized(np.array([4, -4, 3], np.float32)).tolist() == [
        4 / 2 - 0.5 - 1,
        -4 * 2 - 1 - 1,
        3,
    ]


@pytest.mark.parametrize("last_n, seen", [(0, []), (1, [3]), (2, [2, 3]), (-1, [1, 2, 3])])
def test_penalties_look_back_so_far(last_n, seen):
    sampler = Sampler(SamplingParams(presence_penalty=1, penalty_last_n=last_n), [1, 2, 3])
    assert np.flatnonzero(sampler.penalized(np.zeros(5, np.float32))).tolist() == seen


def test_draws_follow_the_probabilities():
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=0, top_p=1, min_p=0, seed=1), [])
    logits = log(0.5, 0.3, 0.2)
    counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=3) / 4000
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    assert np.abs(counts - expected).max() < 0.03


def test_a_seed_repeats():
    logits = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    first, second = (Sampler(SamplingParams(seed=7), []) for _ in range(2))
    assert [first.sample(logits) for _ in range(50)] == [second.sample(logits) for _ in range(50)]


def test_logits_are_left_as_they_are():
    logits = np.array([1, 2, 3], np.float32)
    Sampler(SamplingParams(repeat_penalty=3), [2]).sample(logits)
    assert logits.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"repeat_penalty": 0.0},
        {"max_tokens": -3},
        {"stop": ["a", ""]},
        {"stop": "abc"},
    ],
)
def test_impossible_parameters(wrong):
    with pytest.raises(InputError):
        SamplingParams(**wrong)
