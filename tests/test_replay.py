"""replay.py, kernels/program.py: recorded steps give the bits of steps run by operation."""

import numpy as np
import pytest

from dali_gguf.engine import Engine
from dali_gguf.kernels import ahead
from dali_gguf.layers import MoE
from dali_gguf.sampler import SamplingParams
from tests.small_gguf import small_keys, write_small
from tests.tiny_models import KINDS, N_VOCAB, checkpoint, write_gguf

PLAIN_ONLY = {"deepseek2", "qwen2moe"}  # operations that leave no line


@pytest.fixture(scope="module", autouse=True)
def compiled():
    ahead.do("program")


def decode(path, monkeypatch, replayed: bool, steps, n_seq=1, **options):
    """Logits of each step, and the model's replays."""
    if not replayed:
        monkeypatch.setattr("dali_gguf.replay.MOST_TOKENS", 0)
    with Engine(path, n_ctx=128, n_seq=n_seq, **options) as engine:
        logits = [engine.forward(ids, positions, sequences) for ids, positions, sequences in steps]
        return np.array(logits), engine.model._replays


def one_by_one(n):
    rng = np.random.default_rng(5)
    return [([int(rng.integers(3, N_VOCAB))], [i], [0]) for i in range(n)]


@pytest.mark.parametrize("name", KINDS)
def test_every_architecture_gives_the_same_bits(name, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", KINDS[name], checkpoint(KINDS[name]))
    steps = one_by_one(12)
    ours, replays = decode(path, monkeypatch, True, steps)
    plain, none = decode(path, monkeypatch, False, steps)
    assert np.array_equal(ours, plain)
    assert not none._programs
    used = KINDS[name].architecture not in PLAIN_ONLY
    assert (len(replays._proven), len(replays._useless)) == (used, not used)


def test_several_sequences_and_threads(tmp_path, monkeypatch):
    path = write_small(tmp_path / "small.gguf")
    steps = [([7 + i, 9 + i, 11 + 2 * i], [i, i, i], [0, 1, 2]) for i in range(9)]
    ours, replays = decode(path, monkeypatch, True, steps, n_seq=3, threads=3)
    assert len(replays._proven) == 1
    assert np.array_equal(ours, decode(path, monkeypatch, False, steps, n_seq=3, threads=1)[0])


def test_what_grows_is_recorded_anew(tmp_path):
    """Positions beyond the first rope table (512), and attention memory that a longer context
    needs; a large prefill between moves the shared buffers."""
    path = write_small(tmp_path / "small.gguf", keys=lambda writer: small_keys(writer, 1200))
    ids, got, seen = list(range(3, 203)) * 5, {}, []
    with Engine(path, n_ctx=1200) as engine:
        expected = engine.logits(ids)
    with Engine(path, n_ctx=1200) as engine:
        for start, end in ((0, 4), (505, 530), (990, 1000)):
            for i in range(start, end):
                got[i] = engine.forward([ids[i]], [i])[0]
                seen += [p for p in engine.model._replays._programs.values() if p not in seen]
            for first in range(end, {4: 505, 530: 990}.get(end, 0), 512):
                last = min(first + 512, {4: 505, 530: 990}[end])
                engine.forward(ids[first:last], np.arange(first, last), rows=None)
        assert len(seen) > 1 and len(engine.model._replays._proven) == 1
    assert all(np.array_equal(logits, expected[i]) for i, logits in got.items())


def test_work_that_the_device_does_not_see_is_noticed(tmp_path, monkeypatch):
    """numpy between the operations: a program would repeat the recorded step's values for ever."""
    path, call = write_small(tmp_path / "small.gguf"), MoE.__call__
    monkeypatch.setattr(MoE, "__call__", lambda self, x, run: 1.5 * call(self, x, run))
    steps = one_by_one(8)
    ours, replays = decode(path, monkeypatch, True, steps)
    assert replays._useless and not replays._proven
    assert np.array_equal(ours, decode(path, monkeypatch, False, steps)[0])


def test_results_stay_as_they_were(tmp_path):
    with Engine(write_small(tmp_path / "small.gguf"), n_ctx=64) as engine:
        logits = [engine.forward([7], [i]) for i in range(6)]
        copies = [x.copy() for x in logits]
        engine.forward([9], [6])
        assert all(np.array_equal(a, b) for a, b in zip(logits, copies))


def test_generate_with_and_without(tmp_path, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=24)
    path, texts = write_small(tmp_path / "small.gguf"), []
    for most in (8, 0):
        monkeypatch.setattr("dali_gguf.replay.MOST_TOKENS", most)
        with Engine(path, n_ctx=64) as engine:
            texts.append(list(engine.tokens([5, 6, 7], greedy)))
    assert texts[0] == texts[1]


def test_nothing_is_recorded_before_it_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "ready", lambda task: False)
    with Engine(write_small(tmp_path / "small.gguf"), n_ctx=64) as engine:
        for i in range(3):
            engine.forward([7], [i])
        assert not engine.model._replays._programs
        monkeypatch.setattr(ahead, "ready", lambda task: True)
        engine.forward([7], [3])
        assert engine.model._replays._programs
