"""SentencePiece merges, against the sentencepiece library and by hand."""

import io
import random

import numpy as np
import pytest

from dali_gguf.tokenizer_spm import SentencePieceModel

sentencepiece = pytest.importorskip("sentencepiece")
SENTENCES = [
    "the cat sat on the mat and the rat sat on the hat",
    "she sells sea shells by the sea shore, surely",
    "in the beginning there were 1234 tokens and 56 words",
    "Größe, Übung, naïve café, déjà vu; größer als alles",
    "one two three four five six seven eight nine ten",
] * 4


@pytest.fixture(scope="module")
def processor():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=420, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def model_of(processor) -> SentencePieceModel:
    size = processor.vocab_size()
    ids = {processor.id_to_piece(id): id for id in range(size)}
    scores = np.array([processor.get_score(id) for id in range(size)], np.float32)
    return SentencePieceModel(ids, scores, processor.unk_id())


def test_as_the_sentencepiece_library(processor):
    model, rng = model_of(processor), random.Random(3)
    letters = "thecats ß é,1\n🦙日 "
    texts = SENTENCES[:5] + [
        "".join(rng.choices(letters, k=rng.randrange(1, 40))) for _ in range(300)
    ]
    for text in texts:  # the library adds the space that the caller of the model adds here
        assert model.encode(" " + text) == processor.encode(text), text


def test_best_score_first_then_leftmost():
    ids = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "aa": 5}
    scores = np.array([0, 0, 0, -2, -1, -3], np.float32)
    model = SentencePieceModel(ids, scores, None)
    assert model.encode("abc") == [0, 4]
    assert model.encode("aaa") == [5, 0]
    assert model.encode("aaaab") == [5, 0, 3]


def test_bytes_stand_for_what_is_no_token():
    ids = {"a": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    model = SentencePieceModel(ids, np.zeros(257, np.float32), None)
    assert model.encode("aé") == [0, 0xC3 + 1, 0xA9 + 1]


def test_unknown_where_there_are_no_byte_tokens():
    assert SentencePieceModel({"a": 0, "<unk>": 1}, np.zeros(2, np.float32), 1).encode("ab") == [
        0,
        1,
    ]
    assert SentencePieceModel({"a": 0}, np.zeros(1, np.float32), None).encode("ab") == [0]


def test_tokens_that_go_on_over_a_space():
    ids = {"a": 0, "\u2581": 1, "a\u2581": 2, "a\u2581a": 3, "\u2581a": 4}
    scores = np.array([0, 0, -1, -2, -3], np.float32)
    assert SentencePieceModel(ids, scores, None).encode("a a") == [3]
