"""Tokenizer files to GGUF keys, and the names of pre-tokenizers."""

import json

import numpy as np
import pytest

from dali_gguf.convert.gguf_output import V, array, boolean, string, u32
from dali_gguf.convert.model_keys import ARCHITECTURES, Config
from dali_gguf.convert.pre_tokenizer import HASHES, STRUCTURES, recognize
from dali_gguf.convert.sentencepiece_file import read_pieces
from dali_gguf.convert.vocabulary import tokenizer_keys
from dali_gguf.errors import ConvertError
from dali_gguf.tokenizer import Tokenizer
from dali_gguf.tokenizer_patterns import PRE_TOKENIZERS
from tests.tiny_checkpoints import tokenizer_json, write_sentencepiece, write_tokenizer
from tests.vocabulary_file import N_VOCAB

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# the pre_tokenizer of the hub's files, as (regular expressions, "digits" or "bytes" of ByteLevel)
FILES = {
    "gpt-2": ["bytes"],
    "smollm": ["digits", "bytes"],
    "llama-bpe": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        + CONTRACTIONS
        + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        + CONTRACTIONS
        + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek-v3": [
        r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", "digits"],
}  # fmt: skip


def pre_tokenizer(parts: list[str]) -> dict:
    nodes = []
    for part in parts:
        if part == "digits":
            nodes.append({"type": "Digits", "individual_digits": True})
        elif part != "bytes":
            nodes.append(
                {
                    "type": "Split",
                    "pattern": {"Regex": part},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": parts[-1] == "bytes",
    }
    return {"type": "Sequence", "pretokenizers": [*nodes, level]} if nodes else level


@pytest.mark.parametrize("name", FILES)
def test_pre_tokenizer_is_known_by_its_structure(name, tmp_path):
    tokenizer = tokenizer_json() | {"pre_tokenizer": pre_tokenizer(FILES[name])}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert recognize(tmp_path / "tokenizer.json", tokenizer) == name


def test_every_name_is_one_the_engine_knows():
    known = set(PRE_TOKENIZERS)
    assert set(STRUCTURES) <= known
    assert set(HASHES.values()) - {"superbpe"} <= known


def config(name: str = "Qwen3MoeForCausalLM", **values) -> Config:
    return Config({"vocab_size": N_VOCAB, **values}, ARCHITECTURES[name], "folder")


def test_byte_level_bpe(tmp_path):
    write_tokenizer(tmp_path)
    keys = tokenizer_keys(tmp_path, config())
    assert keys["tokenizer.ggml.model"] == string("gpt2") and keys["tokenizer.ggml.pre"] == string(
        "gpt-2"
    )
    words = [*json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]]
    padding = [f"[PAD{i}]" for i in range(len(words), N_VOCAB)]
    assert keys["tokenizer.ggml.tokens"] == array(V.STRING, words + padding)
    kinds = [3] * 3 + [1] * (len(words) - 3) + [5] * len(padding)
    assert keys["tokenizer.ggml.token_type"] == array(V.INT32, kinds)
    assert keys["tokenizer.ggml.merges"] == array(
        V.STRING, ["t h", "Ġ t", "h e", "Ġt he", "i n", "e r"]
    )
    assert keys["tokenizer.ggml.bos_token_id"] == u32(1) and keys[
        "tokenizer.ggml.eos_token_id"
    ] == u32(2)
    assert keys["tokenizer.chat_template"] == string("{{ messages[0]['content'] }}")


def test_added_tokens(tmp_path):
    tokenizer = tokenizer_json()
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    tokenizer["added_tokens"] += [
        {"id": 270, "content": "<|tool|>", **plain},
        {"id": 271, "content": "\u2581x", **plain},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokens, kinds = ["?"] * N_VOCAB, [0] * N_VOCAB
    read(tokenizer_keys(tmp_path, config()), tokens, kinds)
    assert (tokens[270], kinds[270]) == ("<|tool|>", 3)  # looks like a control token
    assert (tokens[271], kinds[271]) == (" x", 4)


def read(keys: dict, tokens: list, kinds: list) -> None:
    """Decodes the arrays of tokens and kinds of tokenizer keys."""
    raw, at = keys["tokenizer.ggml.tokens"].raw, 12
    for i in range(len(tokens)):
        size = int.from_bytes(raw[at : at + 8], "little")
        tokens[i], at = raw[at + 8 : at + 8 + size].decode(), at + 8 + size
    raw = keys["tokenizer.ggml.token_type"].raw[12:]
    kinds[:] = [int.from_bytes(raw[4 * i : 4 * i + 4], "little") for i in range(len(kinds))]


def test_sentencepiece_settings_of_llama(tmp_path):
    write_sentencepiece(tmp_path)
    decoder = {
        "258": {"content": "<pad>", "special": True},
        "270": {"content": "[X]", "special": False},
    }
    settings = {"add_prefix_space": False, "add_bos_token": True, "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1}))
    keys = tokenizer_keys(tmp_path, config("LlamaForCausalLM"))
    tokens, kinds = ["?"] * N_VOCAB, [0] * N_VOCAB
    read(keys, tokens, kinds)
    assert (tokens[258], kinds[258], tokens[270], kinds[270]) == ("<pad>", 3, "[X]", 4)
    assert keys["tokenizer.ggml.add_space_prefix"] == boolean(False)
    assert keys["tokenizer.ggml.bos_token_id"] == u32(1)
    assert "tokenizer.ggml.merges" not in keys


def test_sentencepiece_bpe_in_a_tokenizer_json(tmp_path):
    """Scores come from the order of merges, so that the same words come out."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "\u2581",
        "a",
        "b",
        "ab",
        "\u2581ab",
    ]
    model = {
        "type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "vocab": {w: i for i,
        w in enumerate(words)},
        "merges": ["a b", "\u2581 ab"],
    }  # fmt: skip
    added = [{"id": i, "content": w, "special": True} for i, w in enumerate(words[:3])]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    keys = tokenizer_keys(tmp_path, config("MixtralForCausalLM", bos_token_id=1, eos_token_id=2))
    assert keys["tokenizer.ggml.model"] == string("llama")
    tokens, kinds = ["?"] * N_VOCAB, [0] * N_VOCAB
    read(keys, tokens, kinds)
    assert kinds[:4] == [2, 3, 3, 6] and kinds[262] == 1
    scores = np.frombuffer(keys["tokenizer.ggml.scores"].raw[12:], np.float32)
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.bos_token_id": 1,
    }  # fmt: skip
    assert Tokenizer.from_metadata(metadata).encode("ab", add_special=False) == [
        words.index("\u2581ab")
    ]


def test_read_pieces_is_sentencepieces_own_view(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    write_sentencepiece(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(
        model_proto=(tmp_path / "tokenizer.model").read_bytes()
    )
    pieces = read_pieces(tmp_path / "tokenizer.model")
    assert [p[0] for p in pieces] == [processor.IdToPiece(i) for i in range(processor.vocab_size())]
    assert [p[1] for p in pieces] == [processor.GetScore(i) for i in range(processor.vocab_size())]


def test_tokenizer_model_of_another_format(tmp_path):
    """Llama 3 has a tokenizer.model that is no SentencePiece file: tokenizer.json is taken."""
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    assert tokenizer_keys(tmp_path, config("LlamaForCausalLM"))["tokenizer.ggml.model"] == string(
        "gpt2"
    )


def test_word_piece_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordPiece"}}))
    with pytest.raises(ConvertError, match="WordPiece"):
        tokenizer_keys(tmp_path, config())
