"""Perplexity of a model on a text, and how far its predictions are from another model's.

As llama-perplexity does it: runs of n_ctx tokens, each from an empty context; the second half of a
run is judged, so that every prediction has at least n_ctx / 2 tokens before it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Logits = Callable[[list[int]], np.ndarray]


@dataclass(slots=True)
class Mean:
    """A running mean of many values and its standard error."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, values: np.ndarray) -> None:
        self.count += values.size
        self.total += float(values.sum(dtype=np.float64))
        self.squares += float(np.square(values, dtype=np.float64).sum())

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def error(self) -> float:
        if self.count < 2:
            return math.nan
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2) / (self.count - 1))


@dataclass(slots=True)
class Judgement:
    """loss: nats a token of the judged model; base_loss, divergence (KL(base || model), nats),
    agreement (same most likely token) where a base model was given."""

    loss: Mean = field(default_factory=Mean)
    base_loss: Mean = field(default_factory=Mean)
    divergence: Mean = field(default_factory=Mean)
    agreement: Mean = field(default_factory=Mean)

    def add(self, ids: list[int], logits: np.ndarray, base: np.ndarray | None) -> None:
        """One run: ids [T], logits [T, n_vocab] after each of them."""
        first = len(ids) // 2
        targets = np.asarray(ids[first + 1 :])
        rows = slice(first, len(ids) - 1)
        log_p = log_softmax(logits[rows])
        at = (np.arange(len(targets)), targets)
        self.loss.add(-log_p[at])
        if base is None:
            return
        log_q = log_softmax(base[rows])
        self.base_loss.add(-log_q[at])
        self.divergence.add((np.exp(log_q) * (log_q - log_p)).sum(1))
        self.agreement.add((log_q.argmax(1) == log_p.argmax(1)).astype(np.float64))

    def line(self) -> str:
        """The running figures, one line."""
        text = f"perplexity {math.exp(self.loss.mean):.4f}"
        if self.divergence.count:
            text += f"  base {math.exp(self.base_loss.mean):.4f}  KL {self.divergence.mean:.5f}"
            text += f"  same top {100 * self.agreement.mean:.2f} %"
        return text

    def report(self) -> str:
        """The result with standard errors, and as lines to be compared with llama-perplexity's."""
        ppl = math.exp(self.loss.mean)
        lines = [
            f"perplexity: {ppl:.4f} +- {ppl * self.loss.error:.4f} ({self.loss.count} tokens "
            f"judged)"
        ]
        if self.divergence.count:
            base = math.exp(self.base_loss.mean)
            lines += [
                f"base perplexity: {base:.4f} +- {base * self.base_loss.error:.4f}, ratio "
                f"{ppl / base:.5f}",
                f"KL divergence from the base: {self.divergence.mean:.6f} +- "
                f"{self.divergence.error:.6f} nats",
                f"same most likely token: {100 * self.agreement.mean:.3f} +- "
                f"{100 * self.agreement.error:.3f} %",
            ]
        return "\n".join(lines)


def log_softmax(x: np.ndarray) -> np.ndarray:
    """float64 [T, n_vocab]."""
    x = x.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))
