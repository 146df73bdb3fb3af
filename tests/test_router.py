"""Routing rules, on cases one can follow by hand."""

import numpy as np

from dali_gguf.router import RouterRule, route


def test_softmax_over_all_experts():
    logits = np.log(np.array([[1, 4, 2, 3]], np.float32))
    routing = route(logits, 2, RouterRule())
    assert routing.expert_ids.tolist() == [[1, 3]] and routing.expert_ids.dtype == np.int32
    assert np.allclose(routing.weights, [[0.4, 0.3]]) and routing.weights.dtype == np.float32
    assert routing.workload.tolist() == [0, 1, 0, 1]


def test_normalized_and_scaled():
    logits = np.log(np.array([[1, 4, 2, 3]], np.float32))
    assert np.allclose(route(logits, 2, RouterRule(normalize=True, scale=7)).weights, [[4, 3]])


def test_softmax_over_the_chosen_only():
    logits = np.log(np.array([[1, 4, 2, 12]], np.float32))
    routing = route(logits, 2, RouterRule(scoring="softmax_after"))
    assert routing.expert_ids.tolist() == [[3, 1]] and np.allclose(routing.weights, [[0.75, 0.25]])


def test_bias_chooses_but_does_not_weight():
    bias = np.array([0, 0, 9, 0], np.float32)
    routing = route(np.zeros((1, 4), np.float32), 1, RouterRule(scoring="sigmoid", bias=bias))
    assert routing.expert_ids.tolist() == [[2]] and np.allclose(routing.weights, [[0.5]])


def test_groups_count_their_two_best_with_sigmoid_and_their_best_with_softmax():
    logits = np.array([[3.0, -9.0, 2.0, 2.0]], np.float32)  # groups: (3, -9) and (2, 2)
    two = route(logits, 1, RouterRule(scoring="sigmoid", n_group=2, n_group_used=1))
    one = route(logits, 1, RouterRule(scoring="softmax", n_group=2, n_group_used=1))
    assert two.expert_ids.tolist() == [[2]] and one.expert_ids.tolist() == [[0]]


def test_ties_go_to_the_lower_expert():
    assert (
        route(np.zeros((3, 8), np.float32), 3, RouterRule()).expert_ids.tolist() == [[0, 1, 2]] * 3
    )


def test_every_token_to_one_expert():
    logits = np.full((5, 4), -50, np.float32)
    logits[:, 2] = 50
    assert route(logits, 1, RouterRule(normalize=True)).workload.tolist() == [0, 0, 5, 0]


def test_nan_logits_still_give_experts_that_exist():
    routing = route(np.full((2, 4), np.nan, np.float32), 2, RouterRule(normalize=True))
    assert routing.expert_ids.min() >= 0 and routing.expert_ids.max() < 4
