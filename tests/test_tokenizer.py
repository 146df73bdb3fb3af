"""Encoding and decoding, against llama.cpp's ids and by hand."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import TokenType

from dali_gguf.errors import DaliError, InputError, ModelFileError
from dali_gguf.tokenizer import StreamDecoder, Tokenizer
from tests import vocabularies

NAMES = ("bpe", "spm")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_metadata(vocabularies.metadata(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name, tokenizers):
    tokenizer = tokenizers[name]
    for text, add_special, parse_special, expected in vocabularies.cases(name):
        if len(expected) > 1 and expected[:2] == [tokenizer.bos_id] * 2 and tokenizer.add_bos:
            expected = expected[1:]  # llama.cpp warns of a second BOS and keeps it
        assert tokenizer.encode(text, add_special, parse_special) == expected, text


@pytest.mark.parametrize("name", NAMES)
def test_decode_gives_the_text_back(name, tokenizers):
    for text, add_special, parse_special, _ in vocabularies.cases(name):
        if parse_special or "\u2581" in text:
            continue  # control tokens are not shown; SentencePiece reads its own sign as a space
        assert tokenizers[name].decode(tokenizers[name].encode(text, add_special)) == text


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_end_an_answer_are_those_of_llama_cpp(name, tokenizers):
    assert tokenizers[name].end_ids == set(vocabularies.data()[name]["end_ids"])


def test_bos_is_added_once(tokenizers):
    spm = tokenizers["spm"]
    assert spm.encode("Hi")[:1] == [1] and spm.encode("Hi")[1] != 1
    assert spm.encode("<s>Hi", parse_special=True)[:2] == spm.encode("Hi")[:2]
    assert 1 not in spm.encode("Hi", add_special=False)
    assert spm.encode("") == [1] and spm.encode("", add_special=False) == []


def test_control_tokens_are_text_unless_asked_for(tokenizers):
    bpe = tokenizers["bpe"]
    assert bpe.encode("<|im_end|>", parse_special=True) == [2]
    assert 2 not in bpe.encode("<|im_end|>")
    assert bpe.decode([1, 2]) == "" and bpe.decode([1, 2], special=True) == "<|im_start|><|im_end|>"


def test_keys_of_the_file_win():
    keys = vocabularies.metadata("spm", add_bos_token=False, add_eos_token=True)
    assert Tokenizer.from_metadata(keys).encode("a")[-1] == 2
    assert Tokenizer.from_metadata(keys).encode("a")[0] != 1
    keys = vocabularies.metadata("spm", add_space_prefix=False)
    spaced = Tokenizer.from_metadata(vocabularies.metadata("spm"))
    plain = Tokenizer.from_metadata(keys)
    assert plain.encode(" a", add_special=False) == spaced.encode("a", add_special=False)
    assert plain.decode(plain.encode(" a")) == " a"


def test_user_defined_tokens_are_always_cut_out_longest_first():
    keys = vocabularies.metadata("bpe")
    tokens, kinds = list(keys["tokenizer.ggml.tokens"]), keys["tokenizer.ggml.token_type"].copy()
    tokens[1000:1002] = ["<x>", "<x><y>"]
    kinds[1000:1002] = TokenType.USER_DEFINED
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    keys["tokenizer.ggml.merges"] = []
    tokenizer = Tokenizer.from_metadata(keys)
    assert tokenizer.encode("<x><y><x>") == [1001, 1000]
    assert tokenizer.decode([1001, 1000]) == "<x><y><x>"


def test_unknown_pre_tokenizer_warns_and_works():
    with pytest.warns(UserWarning, match="'surprise'"):
        unknown = Tokenizer.from_metadata(vocabularies.metadata("bpe", pre="surprise"))
    default = Tokenizer.from_metadata(vocabularies.metadata("bpe", pre="default"))
    assert unknown.encode("In 1234 days!") == default.encode("In 1234 days!")
    with pytest.warns(UserWarning, match="no pre-tokenizer is named"):
        Tokenizer.from_metadata(vocabularies.metadata("bpe", pre=None))


def test_streaming_gives_whole_characters_only(tokenizers):
    for name in NAMES:
        tokenizer, text = tokenizers[name], "a🦙é日b"
        decoder = StreamDecoder(tokenizer)
        ids = tokenizer.encode(text, add_special=False)
        pieces = [decoder.push(id) for id in ids]
        assert len(ids) > len(text) and "\ufffd" not in "".join(pieces)
        assert "".join(pieces).strip() == text and decoder.finish() == ""
        llama = tokenizer.encode("🦙", add_special=False)[-4:]
        decoder = StreamDecoder(tokenizer)
        assert [decoder.push(id) for id in llama[:-1]] == [""] * 3
        assert decoder.finish() == "\ufffd"


def test_text_that_is_no_unicode_becomes_replacement_characters(tokenizers):
    for tokenizer in tokenizers.values():
        assert tokenizer.encode("a\udcffb") == tokenizer.encode("a\ufffdb")


def test_markers_of_thinking_are_shown():
    keys = vocabularies.metadata("bpe")
    tokens, kinds = list(keys["tokenizer.ggml.tokens"]), keys["tokenizer.ggml.token_type"].copy()
    added = ["<|channel|>", "<|call|>", "<|return|>", "<|end|>"]
    tokens[1000:1004], kinds[1000:1004] = added, TokenType.CONTROL
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = Tokenizer.from_metadata(keys | {"tokenizer.ggml.merges": []})
    assert tokenizer.decode([1000, 1003]) == "<|channel|>"
    assert {1001, 1002} <= tokenizer.end_ids and 1003 not in tokenizer.end_ids


def test_a_common_word_that_looks_like_an_end_stays_a_word():
    keys = vocabularies.metadata("bpe")
    tokens = list(keys["tokenizer.ggml.tokens"])
    tokens[1000:1002] = ["</s>", "<|eot_id|>"]
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    tokenizer = Tokenizer.from_metadata(keys)
    assert 1000 not in tokenizer.end_ids and 1001 in tokenizer.end_ids
    assert tokenizer.decode([1000, 1001]) == "</s>"


def test_ids_outside_the_vocabulary(tokenizers):
    for id in (-1, 1024):
        with pytest.raises(InputError, match=f"token id {id}: .* 0 to 1023"):
            tokenizers["bpe"].decode([id])


@pytest.mark.parametrize("name", NAMES)
def test_vocabulary_only_file(name, tokenizers, tmp_path):
    path = vocabularies.write(tmp_path / "v.gguf", vocabularies.metadata(name))
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.encode("Hello world") == tokenizers[name].encode("Hello world")


def test_errors_name_file_and_key(tmp_path):
    path = vocabularies.write(tmp_path / "v.gguf", vocabularies.metadata("bpe", model="wordpiece"))
    with pytest.raises(DaliError, match=r"v\.gguf: tokenizer model 'wordpiece'"):
        Tokenizer.from_gguf(path)
    with pytest.raises(ModelFileError, match="no such file"):
        Tokenizer.from_gguf(tmp_path / "none.gguf")


def test_a_large_vocabulary_is_ready_soon():
    """150,000 tokens and merges: well under a second of processor time, also on a slow machine."""
    letters = vocabularies.byte_tokens()
    pairs = [(a, b) for a in letters for b in letters]
    merges = [f"{a} {b}" for a, b in pairs] + [f"{a}{b} {a}" for a, b in pairs]
    tokens = letters + [merge.replace(" ", "", 1) for merge in merges] + ["<|endoftext|>"]
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.full(len(tokens), TokenType.NORMAL, np.int32),
        "tokenizer.ggml.merges": merges,
    }
    started = time.process_time()
    assert Tokenizer.from_metadata(keys).encode("ab") == [256 + 256 * ord("a") + ord("b")]
    assert time.process_time() - started < 2


@pytest.mark.skipif("DALI_VOCAB" not in os.environ, reason="DALI_VOCAB names no folder")
def test_files_in_dali_vocab():
    """NAME.gguf with NAME.gguf.inp (texts) and .out (ids), as in llama.cpp's test data."""
    files = sorted(Path(os.environ["DALI_VOCAB"]).glob("*.gguf"))
    assert files
    for path in files:
        tokenizer = Tokenizer.from_gguf(path)
        texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = Path(f"{path}.out").read_text().split("\n")
        for text, line in zip(texts, lines, strict=False):
            assert tokenizer.encode(text, add_special=False) == [int(id) for id in line.split()]
