"""Traces: files, cuts, orders, errors."""

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.offload import trace as traces
from dali_gguf.offload.trace import Trace


def make(lengths=(6, 4, 6, 4), documents=(0, 0, 1, 1), n_layer=2, n_used=2, n_expert=5, d=3):
    rng = np.random.default_rng(0)
    n = sum(lengths)
    ids = rng.permuted(np.tile(np.arange(n_expert, dtype=np.int16), (n, n_layer, 1)), axis=2)
    return Trace(
        np.ascontiguousarray(ids[..., :n_used]),
        np.full((n, n_layer, n_used), 0.5, np.float16),
        np.cumsum([0, *lengths]),
        np.array(documents, np.int32),
        rng.standard_normal((n, n_layer, d)).astype(np.float16),
        rng.standard_normal((n_layer, n_expert, d)).astype(np.float32),
        np.zeros((n_layer, n_expert), np.float32),
        n_expert,
        d,
        7,
        99,
        "toy.gguf",
    )


def test_file_keeps_everything(tmp_path):
    trace, path = make(), tmp_path / "t.npz"
    traces.save(trace, path)
    back = traces.load(path)
    for name in traces.ARRAYS:
        assert (getattr(back, name) == getattr(trace, name)).all(), name
    assert (back.n_expert, back.expert_bytes, back.model) == (5, 99, "toy.gguf")


def test_split_takes_some_of_every_document():
    first, rest = traces.split(make())
    assert first.documents.tolist() == [0, 1] and rest.documents.tolist() == [0, 1]
    assert len(first.ids) == 12 and len(rest.inputs) == 8
    single = traces.split(make((10,), (0,)))
    assert [len(t.ids) for t in single] == [4, 6]


def test_orders_and_workload():
    trace = make()
    order = traces.decode_order(trace, 2)
    assert order.tolist() == [
        [0, 6],
        [1, 7],
        [2, 8],
        [3, 9],
        [10, 16],
        [11, 17],
        [12, 18],
        [13, 19],
    ]
    ids = traces.step_ids(trace.ids, order)
    assert ids.shape == (8, 2, 4) and sorted(ids[0, 1]) == sorted(
        [*trace.ids[0, 1], *trace.ids[6, 1]]
    )
    workload = traces.step_workload(ids, 5)
    assert workload.sum() == ids.size and (workload.sum(2) == 4).all()
    assert traces.prefill_order(trace, 6).shape == (3, 6)
    assert (trace.counts().sum(1) == 40).all()
    for order, size in ((traces.decode_order, 5), (traces.prefill_order, 21)):
        with pytest.raises(InputError, match="record a longer text"):
            order(trace, size)


CSV = "step,layer,token,expert,weight\n"


def write(tmp_path, rows):
    path = tmp_path / "t.csv"
    path.write_text(CSV + "".join(",".join(map(str, r)) + "\n" for r in rows))
    return path


def test_csv_of_batched_decode(tmp_path):
    rows = [
        (s, layer, t, (s + t + layer + k) % 4, 0.5)
        for s in range(3)
        for layer in range(2)
        for t in range(2)
        for k in range(2)
    ]
    trace = traces.load(write(tmp_path, rows))
    assert trace.ids.shape == (6, 2, 2) and trace.n_sequence == 2 and trace.n_expert == 4
    assert set(trace.ids[1, 0]) == {1, 2}  # sequence 0, step 1
    assert set(trace.ids[4, 1]) == {3, 0}  # sequence 1, step 1


def test_csv_errors_name_the_place(tmp_path):
    good = [(0, layer, 0, 1, 1.0) for layer in range(3)]
    with pytest.raises(InputError, match="layer 1 is missing: expected 0 to 2"):
        traces.load(write(tmp_path, [good[0], good[2]]))
    with pytest.raises(InputError, match="layer 2 is missing at step 1, token 0"):
        traces.load(write(tmp_path, good + [(1, 0, 0, 1, 1), (1, 1, 0, 2, 1)]))
    with pytest.raises(InputError, match="line 2 is not five numbers"):
        traces.load(write(tmp_path, [(0, 0, "x", 1, 1)]))
    path = tmp_path / "u.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="expected step,layer,token,expert,weight"):
        traces.load(path)


def test_file_errors(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        traces.load(tmp_path / "none.npz")
    path = tmp_path / "x.npz"
    path.write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(InputError, match="not a trace file"):
        traces.load(path)
    np.savez(path, ids=np.zeros(3))
    with pytest.raises(InputError, match="not a trace file"):
        traces.load(path)
    trace = make()
    trace.ids[:, 1] = 77
    traces.save(trace, path)
    with pytest.raises(InputError, match="layer 1 is missing or has experts outside 0..4"):
        traces.load(path)


def test_trace_of_another_model():
    with pytest.raises(InputError, match="trace of another model: it has 2 layers of 5 experts"):
        make().check_model(48, 128, 8, "qwen3.gguf")
