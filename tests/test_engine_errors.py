"""What the engine says to impossible prompts, options and files."""

import struct

import numpy as np
import pytest

from dali_gguf.engine import Engine
from dali_gguf.errors import InputError, ModelFileError, NumericError, UnsupportedError
from tests.numpy_device import NumpyDevice
from tests.small_gguf import D, small_keys, small_tensors, write_small
from tests.test_engine import PROMPT, cpu, engine, opened, path  # noqa: F401
from tests.vocabulary_file import N_VOCAB


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([], "empty"),
        ([1] * 64, "64 tokens, the context room for 63"),
        ([N_VOCAB], "whole numbers"),
        ([-1], "whole"),
        ([0.5], "whole"),
    ],
)
def test_impossible_prompts(engine, ids, expected):
    for call in (engine.generate, engine.tokens):
        with pytest.raises(InputError, match=expected):
            call(ids)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_batch": 0},
        {"threads": -1},
        {"threads": 513},
        {"n_seq": "2"},
        {"n_ctx": -5},
        {"kv_type": "f8"},
        {"device": "tpu"},
    ],
)
def test_impossible_options(path, wrong):
    with pytest.raises(InputError):
        Engine(path, **wrong)


def test_nan_names_the_layer(tmp_path, cpu):
    tensors = small_tensors()
    tensors["blk.1.attn_norm.weight"] = np.full(D, np.nan, np.float32)
    path = write_small(tmp_path / "nan.gguf", tensors)
    for device in (NumpyDevice(), cpu):
        with opened(path, device) as engine, pytest.raises(NumericError, match="layer 1 of 2"):
            engine.logits(PROMPT)


def without(name):
    return {k: v for k, v in small_tensors().items() if k != name}


@pytest.mark.parametrize(
    "tensors, expected",
    [
        (without("output_norm.weight"), "tensor output_norm.weight is missing"),
        (without("blk.1.ffn_up_exps.weight"), "tensor blk.1.ffn_up_exps.weight is missing"),
        (
            {**small_tensors(), "blk.0.attn_q.weight": np.zeros((32, 64), np.float32)},
            "the shape [32, 64]; expected [64, 64]",
        ),
        (
            {**small_tensors(), "blk.0.attn_norm.weight": np.zeros(31, np.float32)},
            "the shape [31]; expected [64]",
        ),
        (
            {**small_tensors(), "blk.0.odd.weight": np.zeros(32, np.float32)},
            "1 tensors are not part of the llama",
        ),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, expected):
    path = write_small(tmp_path / "bad.gguf", tensors)
    with pytest.raises(ModelFileError) as caught:
        opened(path)
    assert expected in str(caught.value) and str(path) in str(caught.value)


def test_experts_and_their_count_belong_together(tmp_path):
    def no_count(writer):
        small_keys(writer)
        del writer.kv_data[0]["llama.expert_count"]

    with pytest.raises(
        ModelFileError, match="expert_count is missing, but the file has the router blk.0"
    ):
        opened(write_small(tmp_path / "a.gguf", keys=no_count))
    tensors = {k: v for k, v in small_tensors().items() if "gate_inp" not in k}
    with pytest.raises(ModelFileError, match="expert_count is 4, but the file has no router"):
        opened(write_small(tmp_path / "b.gguf", tensors))


def test_a_vocabulary_alone_is_no_model(tmp_path):
    with pytest.raises(ModelFileError, match="only a vocabulary"):
        opened(write_small(tmp_path / "v.gguf", {}))


def test_unknown_architecture_and_type(path, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(
        UnsupportedError, match="'lhama' is not supported; known are deepseek2, gpt-oss, llama"
    ):
        opened(other)
    table = path.read_bytes()
    name = table.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    other.write_bytes(
        table[:name] + struct.pack("<I", 34) + table[name + 4 :]
    )  # TQ1_0: rows of 256
    with pytest.raises(ModelFileError, match="blk.0.attn_q.weight"):
        opened(other)
