"""Byte-level BPE (tokenizer.ggml.model = gpt2).

The tokenizers library cuts text into words and maps their bytes to letters. The merges are done
here: the library's BPE model needs 0.6 s to take in a vocabulary of 150,000 tokens, the two
dictionaries below 0.15 s, and a word seen before is looked up.
"""

from functools import lru_cache

from tokenizers import Regex, pre_tokenizers

from dali_gguf.tokenizer_merge import merge
from dali_gguf.tokenizer_patterns import PreTokenizer

WORDS_REMEMBERED = 1 << 16


def byte_letters() -> dict[str, int]:
    """GPT-2's letter of each byte: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_LETTER = byte_letters()


class BytePairModel:
    def __init__(self, ids: dict[str, int], merges: list[str], rule: PreTokenizer):
        """ids: text of a token -> id. merges: "left right", best first."""
        self._ids = ids
        self._ranks = dict(zip(merges, range(len(merges))))
        self._whole_words = rule.whole_words
        splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in rule.regexes]
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._words = pre_tokenizers.Sequence([*splits, letters])
        self._encode_word = lru_cache(WORDS_REMEMBERED)(self._merge_word)

    def encode(self, text: str) -> list[int]:
        words = self._words.pre_tokenize_str(text)
        return [id for word, _ in words for id in self._encode_word(word)]

    def _merge_word(self, word: str) -> tuple[int, ...]:
        if self._whole_words and word in self._ids:
            return (self._ids[word],)
        found = []
        for symbol in merge(list(word), self._rank):
            if symbol in self._ids:
                found.append(self._ids[symbol])
            else:  # a damaged vocabulary: what single letters it has
                found.extend(self._ids[letter] for letter in symbol if letter in self._ids)
        return tuple(found)

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")


def token_bytes(text: str) -> bytes:
    """The bytes a token's letters stand for; a letter outside the alphabet stays as it is."""
    return b"".join(
        bytes((BYTE_OF_LETTER[letter],)) if letter in BYTE_OF_LETTER else letter.encode()
        for letter in text
    )
