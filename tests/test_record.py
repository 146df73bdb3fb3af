"""Recording a trace through the engine: what is kept is what the model did."""

import numpy as np
import pytest

from dali_gguf.engine import Engine
from dali_gguf.errors import InputError
from dali_gguf.offload import predict_trace
from dali_gguf.offload.record import REPORT_TEXT, RecordingScheduler, record, sequences
from tests.numpy_device import NumpyDevice
from tests.small_gguf import EXPERTS, LAYERS, USED, D, F, write_small

TEXT = "one small step for a model " * 40 + "\f" + "and another document " * 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_small(tmp_path_factory.mktemp("record") / "small.gguf")
    with Engine(path, device=NumpyDevice(), n_batch=24) as engine:
        yield engine


@pytest.fixture(scope="module")
def trace(engine):
    return record(engine, TEXT, length=32)


def test_shapes(engine, trace):
    n = len(trace.ids)
    assert n >= 128 and n % 32 == 0 and trace.n_sequence == n // 32
    assert trace.ids.shape == (n, LAYERS, USED) and trace.inputs.shape == (n, LAYERS, D)
    assert set(trace.documents) == {0, 1} and trace.n_expert == EXPERTS
    assert (trace.n_embd, trace.n_ff_exp) == (D, F) and trace.model == "small.gguf"
    assert trace.expert_bytes == 3 * D * F * 34 // 32
    assert type(engine.scheduler) is not RecordingScheduler  # put back


def test_routers_on_inputs_give_the_ids(trace):
    for layer in range(LAYERS):
        logits = trace.inputs[:, layer].astype(np.float32) @ trace.routers[layer].T
        chosen = np.sort(np.argsort(-logits, 1)[:, :USED], 1)
        same = (chosen == np.sort(trace.ids[:, layer], 1)).all(1)
        assert same.mean() > 0.99  # inputs are kept in half precision


def test_sequences_start_from_an_empty_context(engine, trace):
    ids = sequences(engine.tokenizer.encode(TEXT.split("\f")[1]), 32)
    first = list(trace.documents).index(1)
    alone = record(engine, TEXT.split("\f")[1], length=32)
    assert (alone.ids[:32] == trace.ids[trace.sequence(first)]).all()
    assert alone.n_sequence == len(ids)


def test_predictors_on_a_trace(trace):
    resident = np.zeros((LAYERS, EXPERTS), np.uint8)
    own = predict_trace.judge(
        trace.inputs.astype(np.float32)[:, :, :1] * 0
        + np.stack(
            [trace.inputs[:, i].astype(np.float32) @ trace.routers[i].T for i in range(LAYERS)], 1
        ),
        trace,
        resident,
    )
    assert own[0].recall > 0.99 and own[0].recall_2a == 1 and own[0].precision > 0.99
    for kind in ("residual", "linear", "next-router", "frequency"):
        (found,) = predict_trace.judge(predict_trace.rankings(kind, trace, trace), trace, resident)
        assert USED / EXPERTS * 0.8 < found.recall <= found.recall_2a == 1


def test_sequences():
    assert sequences(list(range(10)), 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sequences(list(range(70)), 512) == [list(range(70))] and sequences([1] * 9, 512) == []


def test_errors(engine):
    with pytest.raises(InputError, match="too short"):
        record(engine, "hi", length=64)


def test_the_text_that_ships():
    text = REPORT_TEXT.read_text(encoding="utf-8")
    assert len(text.split("\f")) == 12 and len(text.encode()) < 200_000
