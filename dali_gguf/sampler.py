"""Logits -> the next token, with llama.cpp's defaults, meanings, and order of steps.

Order: penalties, top-k, top-p, min-p, temperature, then a draw.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from dali_gguf.errors import InputError

GROUP = 64  # logits whose maximum is taken first when looking for the best


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """temperature 0: the most likely token, ties to the lowest id; then only penalties count.

    top_k 0, top_p 1, min_p 0, repeat_penalty 1, presence and frequency 0: switched off.
    penalty_last_n: tokens that count for penalties, prompt included (0: none, -1: all).
    seed -1: another one each time. max_tokens -1: until end of text, -2: until the context is
    full (end of text is not a reason to stop). ignore_eos: it is no reason to stop for any
    max_tokens. stop: texts that end the answer, not shown.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int = -1
    max_tokens: int = -1
    stop: tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        finite = [
            self.temperature,
            self.top_p,
            self.min_p,
            self.presence_penalty,
            self.frequency_penalty,
        ]
        if not all(math.isfinite(x) for x in finite):
            raise InputError("a sampling parameter is not a finite number")
        if not (math.isfinite(self.repeat_penalty) and self.repeat_penalty > 0):
            raise InputError(
                f"repeat penalty is {self.repeat_penalty}; expected a number above 0 (1 is off)"
            )
        if self.max_tokens < -2:
            raise InputError(f"number of tokens is {self.max_tokens}; expected 0 or more, -1 or -2")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InputError("stop texts: expected a list of texts that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def never_ends(self) -> bool:
        """Whether the answer goes on over tokens that end a text."""
        return self.ignore_eos or self.max_tokens == -2


class Sampler:
    """Draws tokens one after another, and remembers them for the penalties."""

    def __init__(self, params: SamplingParams, prompt: list[int]):
        self.params = params
        self.history = list(prompt)
        self.random = np.random.default_rng(None if params.seed < 0 else params.seed)

    def sample(self, logits: np.ndarray) -> int:
        """logits float32 [n_vocab], left as they are. Returns a token id."""
        p = self.params
        logits = self.penalized(logits)
        if p.greedy:
            token = int(logits.argmax())
        else:
            ids, kept = candidates(logits, p.top_k)
            kept = min_p(top_p(kept, p.top_p), p.min_p)
            token = int(ids[self._draw(kept / np.float32(p.temperature))])
        self.history.append(token)
        return token

    def _draw(self, logits: np.ndarray) -> int:
        """An index, with the probabilities softmax(logits)."""
        total = np.cumsum(np.exp((logits - logits[0]).astype(np.float64)))
        return min(
            int(np.searchsorted(total, self.random.random() * total[-1], "right")), len(logits) - 1
        )

    def penalized(self, logits: np.ndarray) -> np.ndarray:
        """Divides (or, below zero, multiplies) seen tokens' logits, and subtracts by count."""
        p = self.params
        window = (
            self.history
            if p.penalty_last_n < 0
            else self.history[-p.penalty_last_n or len(self.history) :]
        )
        off = p.repeat_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0
        if off or not window:
            return logits
        counts = Counter(window)
        ids, n = np.array(list(counts)), np.array(list(counts.values()), np.float32)
        logits, seen = logits.copy(), logits[ids]
        seen = np.where(seen <= 0, seen * p.repeat_penalty, seen / p.repeat_penalty)
        logits[ids] = seen - n * p.frequency_penalty - p.presence_penalty
        return logits


def candidates(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best (0: all) as ids and logits, best first, ties to the lower id."""
    ids = np.arange(len(logits))
    if 0 < k < len(logits) // GROUP:
        # At least k logits reach the k-th largest of the groups' maxima, so the k best all do. Ten
        # times faster than a partition of 150,000 logits.
        largest = logits[: len(logits) // GROUP * GROUP].reshape(-1, GROUP).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(largest, -k)[-k])
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    ids = ids[:k] if k > 0 else ids
    return ids, logits[ids]


def top_p(logits: np.ndarray, p: float) -> np.ndarray:
    """The fewest of the best whose probabilities add up to p, one at least."""
    if p >= 1:
        return logits
    e = np.exp(logits - logits[0])
    return logits[: 1 + np.count_nonzero(np.cumsum(e / e.sum())[:-1] < p)]


def min_p(logits: np.ndarray, p: float) -> np.ndarray:
    """Those at least p times as probable as the best."""
    if p <= 0:
        return logits
    return logits[: max(1, np.count_nonzero(logits >= logits[0] + math.log(p)))]
