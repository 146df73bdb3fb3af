"""Perplexity and divergence, against the formulas written out."""

import math

import numpy as np
import pytest
from scipy.special import log_softmax as reference

from dali_gguf.cli import main
from dali_gguf.convert.judge import Judgement, Mean, log_softmax
from dali_gguf.convert.text_chunks import read_chunks
from dali_gguf.engine import Engine
from dali_gguf.errors import InputError
from tests.small_gguf import write_small


def test_log_softmax():
    x = np.random.default_rng(0).normal(0, 30, (5, 40)).astype(np.float32)
    assert np.allclose(log_softmax(x), reference(x.astype(np.float64), axis=1))


def test_mean_and_error():
    x = np.random.default_rng(1).normal(3, 2, 500)
    mean = Mean()
    mean.add(x[:100])
    mean.add(x[100:])
    assert math.isclose(mean.mean, x.mean()) and math.isclose(mean.error, x.std(ddof=1) / 500**0.5)


def test_second_half_of_a_run_is_judged():
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 20, 8).tolist()
    p, q = (rng.normal(0, 2, (8, 20)) for _ in range(2))
    judgement = Judgement()
    judgement.add(ids, p, q)
    log_p, log_q = (reference(x, axis=1)[4:7] for x in (p, q))
    assert judgement.loss.count == 3
    assert math.isclose(judgement.loss.mean, -np.mean([log_p[i, ids[5 + i]] for i in range(3)]))
    assert math.isclose(judgement.divergence.mean, (np.exp(log_q) * (log_q - log_p)).sum(1).mean())
    assert judgement.agreement.mean == np.mean(p[4:7].argmax(1) == q[4:7].argmax(1))


def test_a_model_is_its_own_base(tmp_path, capsys):
    model = write_small(tmp_path / "m.gguf")
    text = tmp_path / "t.txt"
    text.write_text("w1 w2 w3 and some bytes " * 12)
    flags = ["-f", str(text), "-c", "32", "--kl-base", str(model)]
    assert main(["perplexity", str(model), *flags]) == 0
    out = capsys.readouterr().out
    assert "KL divergence from the base: 0.000000" in out and "100.000" in out


class TestChunks:
    @pytest.fixture
    def engine(self, tmp_path):
        with Engine(write_small(tmp_path / "m.gguf"), n_ctx=32) as engine:
            yield engine

    def test_runs_start_with_bos(self, engine, tmp_path):
        (tmp_path / "t.txt").write_text("w1 w2 " * 40)
        chunks = read_chunks(tmp_path / "t.txt", engine.tokenizer, 16)
        assert len(chunks) == len(engine.tokenizer.encode("w1 w2 " * 40)) // 16
        assert all(len(c) == 16 and c[0] == engine.tokenizer.bos_id for c in chunks)
        assert len(read_chunks(tmp_path / "t.txt", engine.tokenizer, 16, 2)) == 2

    def test_no_text(self, engine, tmp_path):
        (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
        for name in ("none.txt", "bad.txt"):
            with pytest.raises(InputError, match=name):
                read_chunks(tmp_path / name, engine.tokenizer, 16)
