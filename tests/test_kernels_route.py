"""The compiled router = the numpy one."""

import numpy as np
import pytest

from dali_gguf import router
from dali_gguf.kernels.route import route
from dali_gguf.router import RouterRule

RULES = [
    RouterRule(), RouterRule(normalize=True), RouterRule("sigmoid", normalize=True, scale=2.5),
    RouterRule("softmax_after"),
    RouterRule("sigmoid", bias=np.linspace(-1, 1, 13, dtype=np.float32)),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("n_used", [1, 4, 13])
def test_like_numpy(rule, n_used):
    logits = np.random.default_rng(n_used).standard_normal((50, 13)).astype(np.float32) * 3
    ours, theirs = route(logits, n_used, rule), router.route(logits, n_used, rule)
    assert (ours.expert_ids == theirs.expert_ids).all()
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=2e-6)
    assert (ours.workload == theirs.workload).all()
    assert ours.workload.sum() == 50 * n_used


def test_ties_and_nan_give_distinct_experts():
    logits = np.zeros((2, 8), np.float32)
    logits[1] = np.nan
    ids = route(logits, 3, RouterRule()).expert_ids
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2]]
