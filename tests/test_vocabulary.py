"""Tokenizer keys that are missing, mistyped, or contradict each other."""

import numpy as np
import pytest

from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.vocabulary import Vocabulary
from tests import vocabularies


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bpe", {"tokens": None}, "tokens is missing or empty"),
        ("bpe", {"tokens": []}, "tokens is missing or empty"),
        ("bpe", {"tokens": 7}, "tokens is a int; expected a list"),
        ("bpe", {"merges": None}, "merges is missing; expected a list"),
        ("bpe", {"merges": "a b"}, "merges is a str; expected a list"),
        ("bpe", {"pre": 3}, "pre is a int; expected a str"),
        ("bpe", {"model": 3}, "model is a int; expected a str"),
        ("bpe", {"token_type": np.ones(5, np.int32)}, "token_type is 5 numbers; expected 1024"),
        ("bpe", {"bos_token_id": 1024}, "bos_token_id is 1024; expected .* 0 to 1023"),
        ("bpe", {"eos_token_id": "</s>"}, "eos_token_id is a str; expected a int"),
        ("bpe", {"add_bos_token": 1}, "add_bos_token is a int; expected a bool"),
        ("spm", {"scores": None}, "scores is missing; expected a ndarray"),
        ("spm", {"scores": np.full(1024, np.nan, np.float32)}, "scores is an array of float32"),
        ("spm", {"token_type": None}, "token_type is missing"),
    ],
)
def test_bad_keys_are_named(name, changes, message):
    with pytest.raises(ModelFileError, match=f"^m.gguf: tokenizer.ggml.{message}"):
        Vocabulary.from_metadata(vocabularies.metadata(name, **changes), "m.gguf")


def test_kinds_of_tokenizer_that_are_not_known():
    with pytest.raises(
        UnsupportedError, match="tokenizer model 'bert'; this version knows gpt2 and"
    ):
        Vocabulary.from_metadata(vocabularies.metadata("bpe", model="bert"))
    with pytest.raises(UnsupportedError, match="no tokenizer"):
        Vocabulary.from_metadata({"general.architecture": "llama"})


def test_chat_template_of_the_wrong_type():
    keys = vocabularies.metadata("bpe") | {"tokenizer.chat_template": ["a"]}
    with pytest.raises(ModelFileError, match="chat_template is a list; expected a string"):
        Vocabulary.from_metadata(keys)


def test_defaults():
    bpe = Vocabulary.from_metadata(vocabularies.metadata("bpe", token_type=None, bos_token_id=None))
    assert (bpe.kinds == 1).all() and bpe.special_id("bos_token_id") is None
    spm = Vocabulary.from_metadata(vocabularies.metadata("spm", bos_token_id=None))
    assert spm.special_id("bos_token_id") == 1 and spm.special_id("unknown_token_id") == 0


def test_an_empty_token_gets_a_name():
    tokens = ["", *vocabularies.metadata("bpe")["tokenizer.ggml.tokens"][1:]]
    assert (
        Vocabulary.from_metadata(vocabularies.metadata("bpe", tokens=tokens)).tokens[0]
        == "[EMPTY_0]"
    )
