"""The engine on a few-kilobyte model: chunks, stops, limits, figures."""

import numpy as np
import pytest
from dali_gguf.kernels.cpu import CpuDevice

from dali_gguf.engine import Engine, context_size
from dali_gguf.sampler import SamplingParams
from tests.numpy_device import NumpyDevice
from tests.small_gguf import EXPERTS, D, small_tensors, write_small
from tests.vocabulary_file import N_VOCAB

PROMPT = np.random.default_rng(1).integers(3, N_VOCAB, 40).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=16)
CHUNKS = (1, 2, 7, 8, 9, 10, 31, 32, 33, 512)


def opened(path, device=None, **options) -> Engine:
    return Engine(path, device=device or NumpyDevice(), **options)


@pytest.fixture(scope="module")
def cpu():
    device = CpuDevice(2)
    yield device
    device.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("engine") / "small.gguf")


@pytest.fixture
def engine(path):
    with opened(path) as engine:
        yield engine


def chunked(path, device=None) -> list[np.ndarray]:
    """The prompt's logits, once for each size of chunk."""
    results = []
    for n in CHUNKS:
        with opened(path, device, n_batch=n) as engine:
            results.append(engine.logits(PROMPT))
    return results


def test_prefill_in_chunks_gives_the_same_logits(path, cpu):
    ours, oracle = chunked(path, cpu), chunked(path)
    assert ours[0].shape == (len(PROMPT), N_VOCAB) and ours[0].dtype == np.float32
    assert all(np.array_equal(r, ours[0]) for r in ours)  # bit for bit
    assert all(np.abs(r - oracle[0]).max() <= 1e-4 * np.abs(oracle[0]).max() for r in oracle)
    assert (
        np.abs(ours[0] - oracle[0]).max() <= 0.05 * np.abs(oracle[0]).max()
    )  # activations in 8 bits


def test_the_same_bits_without_mapping(path, cpu):
    with opened(path, cpu) as mapped, opened(path, cpu, mmap=False) as read:
        assert np.array_equal(mapped.logits(PROMPT), read.logits(PROMPT))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "f32"])
def test_the_same_bits_with_any_number_of_threads(path, kv_type):
    results = []
    for threads in (1, 2, 3):
        with Engine(path, threads=threads, kv_type=kv_type) as engine:
            results.append(
                (
                    engine.logits(PROMPT),
                    list(engine.tokens(PROMPT, GREEDY)),
                    engine.stats.logits_hash,
                )
            )
    assert all(np.array_equal(r[0], results[0][0]) and r[1:] == results[0][1:] for r in results)


def test_every_token_to_one_pair_of_experts(tmp_path, cpu):
    """Router rows of zero: all experts tie, and the first two of the four win for every token."""
    tensors = small_tensors() | {
        f"blk.{i}.ffn_gate_inp.weight": np.zeros((EXPERTS, D), np.float32) for i in range(2)
    }
    path = write_small(tmp_path / "one.gguf", tensors)
    with opened(path, cpu) as engine:
        seen, moe = [], engine.scheduler.moe
        engine.scheduler.moe = lambda layer, h, routing: (
            seen.append(routing.workload),
            moe(layer, h, routing),
        )[1]
        engine.logits(PROMPT)
    assert [w.tolist() for w in seen] == [[40, 40, 0, 0]] * 2
    ours, oracle = chunked(path, cpu), chunked(path)
    assert all(np.array_equal(r, ours[0]) for r in ours)
    assert np.abs(ours[0] - oracle[0]).max() <= 0.05 * np.abs(oracle[0]).max()


def test_decode_continues_what_prefill_began(path, cpu):
    engine = opened(path, cpu)
    tokens = list(engine.tokens(PROMPT, GREEDY))
    whole = engine.logits(PROMPT + tokens)
    assert whole[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() == tokens


def test_sequences_decoded_together(path, cpu):
    prompts = [PROMPT[:5], PROMPT[5:17], PROMPT[17:20]]
    with opened(path, cpu) as alone:
        expected = [alone.logits(p + [7])[-1] for p in prompts]
    with opened(path, cpu, n_seq=3) as engine:
        for s, prompt in enumerate(prompts):
            assert engine.forward(prompt, range(len(prompt)), [s] * len(prompt), rows=None) is None
        logits = engine.forward([7, 7, 7], [len(p) for p in prompts], [0, 1, 2])
    assert np.array_equal(logits, expected)


def test_text_comes_in_whole_characters(engine, monkeypatch):
    """The bytes of an emoji are four tokens of this vocabulary."""
    emoji = [3 + b for b in "a\U0001f600\u00e9".encode()]
    monkeypatch.setattr(engine, "_tokens", lambda ids, params: iter(emoji))
    assert list(engine.generate(PROMPT)) == ["a", "\U0001f600", "\u00e9"]
    monkeypatch.setattr(engine, "_tokens", lambda ids, params: iter(emoji[:3]))
    assert list(engine.generate(PROMPT)) == ["a", "\ufffd"]


def test_stop_texts(engine, monkeypatch):
    monkeypatch.setattr(
        engine, "_tokens", lambda ids, params: iter([3 + b for b in b"one two three"])
    )
    assert "".join(engine.generate(PROMPT, SamplingParams(stop=["two"]))) == "one "
    assert engine.stats.finish == "stop"


def test_a_prompt_can_be_text(engine):
    ids = engine.tokenizer.encode("hi")
    assert "".join(engine.generate("hi", GREEDY)) == "".join(engine.generate(ids, GREEDY))


def test_number_of_tokens(path):
    with opened(path, n_ctx=48) as engine:
        assert (
            len(list(engine.tokens(PROMPT, SamplingParams(temperature=0, max_tokens=3)))) == 3
            and engine.stats.finish == "length"
        )
        assert list(engine.tokens(PROMPT, SamplingParams(max_tokens=0))) == []
        endless = SamplingParams(temperature=0, max_tokens=-2)
        assert len(list(engine.tokens(PROMPT, endless))) == 8 and engine.stats.finish == "context"
        assert len(list(engine.tokens(PROMPT, SamplingParams(temperature=0, max_tokens=99)))) == 8


def test_end_of_text_ends(engine, monkeypatch):
    logits = np.zeros((1, N_VOCAB), np.float32)
    logits[0, 2] = 9  # </s>
    monkeypatch.setattr(engine, "forward", lambda *a, **k: logits)
    assert list(engine.tokens(PROMPT, GREEDY)) == [] and engine.stats.finish == "eos"
    assert len(list(engine.tokens(PROMPT, SamplingParams(temperature=0, max_tokens=-2)))) == 24


    on = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    assert list(engine.tokens(PROMPT, on)) == [2] * 5 and engine.stats.finish == "length"
    on = SamplingParams(temperature=0, ignore_eos=True)
    assert list(engine.tokens(PROMPT, on)) == [2] * 24 and engine.stats.finish == "context"


def test_everything_is_closed_whatever_fails(path, monkeypatch):
    """And the first error is raised."""
    engine, closed = opened(path), []

    def closing(part, error):
        real = part.close

        def close():
            closed.append(part)
            real()
            if error is not None:
                raise error

        monkeypatch.setattr(part, "close", close)

    closing(engine.scheduler, OSError("first"))
    closing(engine.guard, OSError("second"))
    closing(engine.file, None)
    with pytest.raises(OSError, match="first"):
        engine.close()
    assert closed == [engine.scheduler, engine.guard, engine.file]


def test_figures(engine):
    list(engine.tokens(PROMPT, GREEDY))
    first = engine.stats
    list(engine.tokens(PROMPT, GREEDY))
    assert (
        first.prefill_tokens == len(PROMPT)
        and first.decode_tokens == 15
        and first.finish == "length"
    )
    assert first.decode_rate > 0 and first.prefill_rate > 0 and first.read_rate > 0
    assert first.logits_hash == engine.stats.logits_hash != 0
    assert (
        f"logits {first.logits_hash:08x}" in first.line() and first.as_dict()["decode_tokens"] == 15
    )


def test_interrupted(engine):
    answer = engine.generate(PROMPT, GREEDY)
    next(answer)
    answer.close()
    assert engine.stats.finish == "interrupted" and engine.stats.prefill_tokens == len(PROMPT)


def test_bytes_of_a_token_are_those_of_its_experts(engine):
    expert = engine.model.experts[0].expert_bytes()
    dense = sum(t.nbytes for n, t in engine.file.tensors.items() if "_exps" not in n)
    assert expert == 3 * 32 * 68 and engine.model.bytes_per_token == dense + 2 * 2 * expert


def test_context_is_not_larger_than_trained(path, capsys):
    with opened(path) as engine:
        assert engine.n_ctx == 64 and capsys.readouterr().err == ""
    assert (
        context_size(9999, 64) == 64
        and "9999 is more than the model's 64" in capsys.readouterr().err
    )
    assert context_size(0, 64) == 64 and context_size(16, 64) == 16
