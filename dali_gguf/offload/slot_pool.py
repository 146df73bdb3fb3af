"""One pool of slots over all layers, for the border where any slot takes any expert (disk -> RAM).

Keys are layer * E + expert. Same decayed workload score as offload/cache.py, by tokens instead of
steps: a use of w tokens adds w * 2^(t / half_life) at token t, so scores of all layers compare
without touching them, and everything is rescaled before the unit overflows.
"""

import numpy as np
from numba import njit

from dali_gguf.offload import cache_rules as rules

HALF_LIFE = 16.0


@njit(cache=True, nogil=True)
def _touch(score, keys, workload, unit):
    for i in range(keys.size):
        score[keys[i]] += unit * workload[i]


@njit(cache=True, nogil=True)
def _victims(score, resident, protected, now, victims):
    """Fills victims int64 [n] with the residents of lowest score not protected at `now`, ascending.
    Returns how many there are. n is small: one pass with an insertion per candidate."""
    found = 0
    for k in range(score.size):
        if not resident[k] or protected[k] >= now:
            continue
        if found == victims.size and score[k] >= score[victims[found - 1]]:
            continue
        i = found if found < victims.size else found - 1
        while i > 0 and score[victims[i - 1]] > score[k]:
            victims[i] = victims[i - 1]
            i -= 1
        victims[i] = k
        found = min(found + 1, victims.size)
    return found


class SlotPool:
    """Scores, residents and protection of n_layer * n_expert keys in `capacity` slots.

    Per layer step: touch(layer, ids, workload), protect(keys) for those in use or arriving,
    victims(n) when slots are needed, evict and insert. tick() once a token step. The clock is the
    number of ticks. Nothing is scored while `frozen` (prefill scans would wash the scores out).
    """

    def __init__(self, n_layer: int, n_expert: int, capacity: int, half_life: float = HALF_LIFE):
        self.n_expert, self.capacity = n_expert, capacity
        self.decay = 0.5 ** (1 / half_life)
        n = n_layer * n_expert
        self.score = np.zeros(n)
        self.resident = np.zeros(n, np.uint8)
        self.protected = np.full(n, -1, np.int64)  # last clock at which the key must stay
        self.unit = 1.0
        self.clock = 0
        self.frozen = False

    @property
    def free(self) -> int:
        return self.capacity - int(self.resident.sum())

    def keys(self, layer: int, ids: np.ndarray) -> np.ndarray:
        return layer * self.n_expert + np.asarray(ids, np.int64)

    def touch(self, layer: int, ids: np.ndarray, workload: np.ndarray) -> None:
        """Counts workload [n] tokens for experts ids [n] of a layer."""
        if not self.frozen:
            _touch(self.score, self.keys(layer, ids), np.asarray(workload, np.int64), self.unit)

    def tick(self, tokens: int = 1) -> None:
        """The next token step (of `tokens` tokens in a row)."""
        self.clock += 1
        if not self.frozen:
            self.unit = rules.grow(self.score, self.unit, self.decay**tokens)

    def seed(self, counts: np.ndarray, tokens: float = 1.0) -> None:
        """Scores as if the shares in counts [L, E] had been seen for ever, with `tokens` uses a
        layer and step."""
        share = counts / np.maximum(counts.sum(1, keepdims=True), 1e-9)
        self.score[:] = (share * tokens / (1 - self.decay)).ravel() * self.unit

    def protect(self, keys: np.ndarray, steps: int = 0) -> None:
        """keys stay at least until the clock has advanced by more than `steps`."""
        self.protected[keys] = np.maximum(self.protected[keys], self.clock + steps)

    def release(self, keys: np.ndarray) -> None:
        self.protected[keys] = -1

    def victims(self, n: int) -> np.ndarray:
        """Up to n residents to evict, the lowest score first; fewer if the rest is protected."""
        found = np.empty(n, np.int64)
        return found[: _victims(self.score, self.resident, self.protected, self.clock, found)]

    def insert(self, keys: np.ndarray) -> None:
        self.resident[keys] = 1

    def evict(self, keys: np.ndarray) -> None:
        self.resident[keys] = 0

    def worth(self, key: int) -> float:
        """The decayed score in tokens (comparable over time)."""
        return self.score[key] / self.unit
