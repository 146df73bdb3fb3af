"""Counts kept beside a model; cost profiles kept per machine: round trips and foreign files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dali_gguf.offload import cost_store, counts_file
from dali_gguf.offload.cost_store import Profile
from dali_gguf.offload.counts_file import Counts
from tests.test_trace import make

ROUTERS = [np.full((4, 6), i, np.float32) for i in range(3)]
MARK = counts_file.fingerprint(ROUTERS)
COUNTS = Counts(
    MARK,
    99,
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.ones((2, 6), np.float32),
    np.full((2, 19, 4), 0.5, np.float32),
)


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("DALI_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "toy.Q4_K_M.gguf"
    path.write_bytes(b"")
    return path


def same(a, b):
    return all((getattr(a, k) == getattr(b, k)).all() for k in ("counts", "means", "maps"))


def test_kept_beside_the_model(model):
    path = counts_file.save(model, COUNTS)
    assert path == model.with_name("toy.Q4_K_M.dali.gguf")
    assert not list(path.parent.glob("*.part"))
    back = counts_file.load(model, MARK, (3, 4))
    assert same(back, COUNTS) and back.tokens == 99


def test_kept_in_the_cache_when_the_folder_is_closed(model, tmp_path, monkeypatch):
    model = tmp_path / "closed" / "toy.gguf"
    model.parent.write_text("a file where the folder would be")
    path = counts_file.save(model, COUNTS)
    assert (tmp_path / "cache") in path.parents
    assert same(counts_file.load(model, MARK, (3, 4)), COUNTS)


def test_ignored_with_one_line(model):
    lines = []
    assert counts_file.load(model, MARK, (3, 4), lines.append) is None and not lines
    counts_file.save(model, replace(COUNTS, fingerprint="0" * 32))
    assert counts_file.load(model, MARK, (3, 4), lines.append) is None
    assert len(lines) == 1 and "belongs to another model; ignored" in lines[0]
    model.with_name("toy.Q4_K_M.dali.gguf").write_bytes(b"GGUF\x03\0\0\0broken")
    assert counts_file.load(model, MARK, (3, 4), lines.append) is None
    assert len(lines) == 2 and "is damaged" in lines[1]


def test_from_a_trace():
    trace = make(lengths=(60,), documents=(0,))
    counts = counts_file.from_trace(trace)
    assert (counts.counts == trace.counts()).all() and counts.maps.shape == (1, 10, 5)
    h = trace.inputs.astype(np.float64)
    assert counts.means[0] == pytest.approx((h[:, 1] - h[:, 0]).mean(0), abs=1e-3)


PROFILE = Profile(
    "this cpu",
    "4 experts",
    [1, 2, 4],
    [5.0, 6.0, 9.0],
    [1.0, 1.0, 2.0],
    30.0,
    4.0,
    0.5,
    100.0,
    1e9,
    3000,
)


def test_profile_round_trip(model):
    assert cost_store.load("this cpu", "4 experts") is None
    cost_store.save(PROFILE)
    assert cost_store.load("this cpu", "4 experts") == PROFILE
    costs = PROFILE.model().costs
    assert costs.c[4] == 9 and costs.t == 30 and costs.t_disk == pytest.approx(3)
    assert replace(PROFILE, gpu_us=[]).model().costs.g[1] > 1e6


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"machine": "other"},
        {"cpu_us": [1.0]},
        {"cpu_us": [1.0, -2.0, 3.0]},
        {"r": 0.0},
        {"tokens": [1, 3, 4]},
        {"unknown": 1},
        "not json",
        "[]",
    ],
    ids=str,
)
def test_unusable_profile_is_remade(model, change):
    path = cost_store.save(PROFILE)
    values = json.loads(path.read_text())
    path.write_text(change if isinstance(change, str) else json.dumps(values | change))
    lines = []
    assert cost_store.load("this cpu", "4 experts", lines.append) is None
    assert len(lines) == 1 and "measuring again" in lines[0] and lines[0].count("\n") == 1


def test_stored_prefers_a_gpu(model):
    cpu = cost_store.machine_name(2)
    for machine, gpu in ((cpu, []), (cost_store.machine_name(2, "a card"), [1.0, 1.0, 2.0])):
        cost_store.save(replace(PROFILE, machine=machine, gpu_us=gpu))
    assert cost_store.stored("4 experts", 2).gpu_us and cost_store.stored("5 experts", 2) is None
    assert not cost_store.stored("4 experts", 2, gpu=False).gpu_us
    assert cost_store.stored("4 experts", 3) is None
