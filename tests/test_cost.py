"""Cost model: interpolation, online correction, outliers."""

import numpy as np
import pytest

from dali_gguf.offload.cost import CostModel

TOKENS = [1, 2, 4, 8]


def model(**more):
    return CostModel(TOKENS, [10, 10, 20, 40], [2, 2, 3, 5], 30.0, h_cpu=5.0, max_tokens=64, **more)


def test_tables_interpolate_and_extrapolate():
    costs = model(r=0.5).costs
    assert costs.c[[0, 1, 3, 8, 16]].tolist() == [0, 10, 15, 40, 80]
    assert costs.g[8] == 5 and costs.c.size == 65
    assert (costs.t, costs.h_cpu, costs.r) == (30, 5, 0.5)
    assert CostModel([1], [10], copy_us=1, max_tokens=8).costs.g[1] > 1e6  # no GPU


def test_corrects_towards_what_steps_take():
    costs = model()
    for _ in range(200):
        costs.observe("cpu", [1, 1, 4], 5 + 1.5 * 40)
        costs.observe("gpu", [1, 4], 4.0)
        costs.observe("copy", 2, 90.0)
    assert costs.costs.c[1] == pytest.approx(15, rel=0.1)
    assert costs.costs.c[4] == pytest.approx(30, rel=0.1)
    assert costs.costs.c[8] == 40  # never seen
    assert costs.costs.g[[1, 4]].sum() == pytest.approx(4, rel=0.05)
    assert costs.costs.t == pytest.approx(45, rel=0.05)
    assert costs.margin() == pytest.approx(0.01, abs=0.03)


def test_one_outlier_moves_little():
    costs = model()
    for _ in range(32):
        costs.observe("gpu", [2], 2.0)
    costs.observe("cpu", [1], 1e6)
    costs._rebuild()
    assert costs.costs.c[1] < 11 and costs.margin() <= 0.1


def test_workloads_beyond_the_table():
    costs = model()
    costs.observe("cpu", np.array([1000]), 400.0)
    assert np.isfinite(costs.costs.c).all()


def test_the_disk_is_a_third_source():
    costs = model()
    costs.observe("disk", 4, 400.0)
    assert costs.costs.t_disk == 100, "the first time is taken as it is"
    for _ in range(200):
        costs.observe("disk", 2, 500.0)
    assert costs.costs.t_disk == pytest.approx(250, rel=0.05)
    assert costs.costs.t == 30
    one = model(t_disk=100.0)
    one.observe("disk", 1, 1e9)
    assert one.t_disk < 110, "one outlier moves little"
