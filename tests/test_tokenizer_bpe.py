"""Words that pre-tokenizers cut, and merges, against the tokenizers library's own BPE."""

import pytest
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from dali_gguf.tokenizer_bpe import BytePairModel, byte_letters, token_bytes
from dali_gguf.tokenizer_patterns import PRE_TOKENIZERS
from tests import vocabularies

TEXT = "I'LL pay 12345 €!!\n\n  dontStop Übung,\t日本 éa"
WORDS = {  # DeepSeek's ":-~" takes in ASCII letters too: hence its "Ü|bung"
    "gpt-2": "I|'|LL| pay| 12345| €!!|\n\n | dontStop| Übung|,|\t|日本| éa",
    "smollm": "I|'|LL| pay| |1|2|3|4|5| €!!|\n\n | dontStop| Übung|,|\t|日本| éa",
    "llama-bpe": "I|'LL| pay| |123|45| €!!\n\n| | dontStop| Übung|,|\t日本| éa",
    "qwen2": "I|'LL| pay| |1|2|3|4|5| €!!\n\n| | dontStop| Übung|,|\t日本| éa",
    "gpt-4o": "I'LL| pay| |123|45| €!!\n\n| | dont|Stop| Übung|,|\t日本| éa",
    "tekken": "I|'LL| pay| |1|2|3|4|5| €!!\n\n| | dont|Stop| Übung|,|\t日本| éa",
    "deepseek-v3": "I|'LL| pay| |123|45| €!!\n\n| | dontStop| Übung|,|\t|日本| éa",
    "deepseek-llm": "I|'|LL| pay| |12345| |€|!!|\n|\n| | dontStop| Ü|bung|,|\t|日本| é|a",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4|5| |€|!!|\n|\n| | dontStop| Übung|,|\t|日本| éa",
    "default": "I|'|LL| pay| |123|45| €|!!|\n\n | dontStop| Übung|,|\t|日本| éa",
    "kimi-k2": "I'LL| pay| |123|45| €!!\n\n| | dont|Stop| Übung|,|\t|日本| éa",
}


def words(name: str, text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(r), "isolated") for r in PRE_TOKENIZERS[name].regexes]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", WORDS)
def test_words_by_hand(name):
    assert "|".join(words(name, TEXT)) == WORDS[name]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_rule_loses_text(name):
    text = TEXT + "\u00a0\u3000\r\n🦙\u200d''ll don't  x\x01 \n"
    assert "".join(words(name, text)) == text


def test_names_that_have_to_be_known():
    names = "gpt-2 llama-bpe qwen2 deepseek-llm deepseek-coder deepseek-v3 gpt-4o smollm olmo dbrx"
    assert set(names.split()) | {"tekken", "chatglm-bpe", "glm4", "refact"} <= set(PRE_TOKENIZERS)


@pytest.mark.parametrize("whole_words", [False, True])
def test_merges_as_the_tokenizers_library(whole_words):
    keys = vocabularies.metadata("bpe")
    ids = {token: id for id, token in enumerate(keys["tokenizer.ggml.tokens"])}
    merges = keys["tokenizer.ggml.merges"]
    rule = next(r for r in PRE_TOKENIZERS.values() if r.whole_words == whole_words)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    library = LibraryTokenizer(models.BPE(ids, pairs, ignore_merges=whole_words))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated") for regex in rule.regexes]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    model = BytePairModel(ids, merges, rule)
    for text, *_ in vocabularies.cases("bpe"):
        assert model.encode(text) == library.encode(text, add_special_tokens=False).ids, text


def test_letters_of_bytes():
    letters = byte_letters()
    assert len(letters) == 256 and sorted(letters.values()) == list(range(256))
    assert letters["A"] == 0x41 and letters["Ġ"] == 0x20 and letters["Ċ"] == 0x0A
    assert token_bytes("ĠðŁ") == b" \xf0\x9f"
    assert token_bytes("a日") == "a日".encode()


def test_letters_the_vocabulary_lacks_are_left_out():
    model = BytePairModel({"a": 0, "ab": 1}, ["a b"], PRE_TOKENIZERS["gpt-2"])
    assert model.encode("abaz") == [1, 0]


def test_merge_whose_result_is_no_token():
    model = BytePairModel({"a": 0, "b": 1}, ["a b"], PRE_TOKENIZERS["gpt-2"])
    assert model.encode("ab") == [0, 1]
