"""SentencePiece BPE (tokenizer.ggml.model = llama): the pair that makes the best-scored token."""

import re
from functools import lru_cache

import numpy as np

from dali_gguf.tokenizer_merge import merge

SPACE = "\u2581"  # what SentencePiece writes for a space
WORDS_REMEMBERED = 1 << 16
NEVER = "\U0010ffff"  # a code point that is no character: separates the tokens in one long text


class SentencePieceModel:
    """The library's BPE would need merges in place of scores, and breaks ties another way."""

    def __init__(self, ids: dict[str, int], scores: np.ndarray, unknown: int | None):
        """ids: text of a token -> id. scores: float32 [n_vocab], the highest merges first."""
        self._ids = ids
        self._scores = scores.tolist()
        self._bytes = [ids.get(f"<0x{byte:02X}>", unknown) for byte in range(256)]
        # No token continues over a space: then words are merged alone, and remembered.
        crosses = re.search(f"[^{SPACE}{NEVER}]{SPACE}", NEVER.join(ids))
        self._word = re.compile(".+" if crosses else f"{SPACE}*[^{SPACE}]+|{SPACE}+", re.DOTALL)
        self._encode_word = lru_cache(WORDS_REMEMBERED)(self._merge_word)

    def encode(self, text: str) -> list[int]:
        words = self._word.findall(text.replace(" ", SPACE))
        return [id for word in words for id in self._encode_word(word)]

    def _merge_word(self, word: str) -> tuple[int, ...]:
        found = []
        for symbol in merge(list(word), self._rank):
            if symbol in self._ids:
                found.append(self._ids[symbol])
            else:
                found.extend(self._bytes[byte] for byte in symbol.encode())
        return tuple(id for id in found if id is not None)

    def _rank(self, left: str, right: str) -> float | None:
        id = self._ids.get(left + right)
        return None if id is None else -self._scores[id]


def token_bytes(text: str) -> bytes:
    return text.replace(SPACE, " ").encode()
