"""Which experts of each layer are kept near (on the GPU). The rules are in offload/cache_rules.py.

decayed (default): score = decay * score + tokens; load the best absent for the worst resident when
its score is above hysteresis * worst + margin. workload: the paper's window of steps, then
scores start again. lru, lfu, lfru: every miss is loaded. static: nothing moves.
For one pool of slots over all layers (the disk border) see offload/slot_pool.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload import cache_rules as rules
from dali_gguf.offload.cost import Costs

POLICIES = ("static", "decayed", "workload", "lru", "lfu", "lfru")
NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """decay: per step. window, most: steps between decisions (workload), swaps a layer and step.
    hysteresis, margin: a swap needs score_in > hysteresis * score_out + margin (expected uses that
    pay for one copy; 3-5 where the link is slow)."""

    policy: str = "decayed"
    decay: float = 0.98
    window: int = 32
    most: int = 2
    hysteresis: float = 1.1
    margin: float = 1.0


def settings(policy: str) -> CacheSettings:
    """A policy's usual settings; "decayed", "workload" (w_size 4, u_size 1, as the paper), ..."""
    if policy not in POLICIES:
        raise InputError(f"expert cache {policy!r} is unknown: choose one of {', '.join(POLICIES)}")
    if policy == "workload":
        return CacheSettings(policy, window=4, most=1, hysteresis=1.0, margin=0.0)
    return CacheSettings(policy)


class Swap(NamedTuple):  # a dataclass would take a microsecond more to make
    """Load expert `load` of a layer into the slot of `evict`. value_us: what it should save per
    step, less nothing for an adopted expert (its bytes are already on the device)."""

    load: int
    evict: int
    value_us: float
    adopted: bool


class ExpertCache:
    """Scores and residents of every layer. resident uint8 [L, E] is the truth for placement.

    A step of a layer: placement reads `resident[layer]`; after computing, `step` counts the
    workload and returns swaps. Adopted swaps are already done in `resident`; for a fill call
    `started` when its copy begins (the evicted slot stops being usable) and `finished` at its end.
    """

    def __init__(self, resident: np.ndarray, settings: CacheSettings = CacheSettings()):
        n_layer, n_expert = resident.shape
        self.settings = settings
        self.code = POLICIES.index(settings.policy)
        self.resident = np.ascontiguousarray(resident, np.uint8)
        self.score = np.zeros((n_layer, n_expert))
        self.last = np.full((n_layer, n_expert), -1, np.int64)
        self.unit = np.ones(n_layer)
        self.clock = np.zeros(n_layer, np.int64)
        self.frozen = False  # True in long prefills: workloads count, nothing moves
        self._swaps, self._gains = np.empty((2 * n_expert, 2), np.int64), np.empty(2 * n_expert)

    def seed(self, counts: np.ndarray, tokens_per_step: float = 1.0) -> None:
        """Starts the scores as if the shares in counts [L, E] had been seen for ever: share * uses
        a step / (1 - decay). Only for scores that decay; others start empty."""
        if self.settings.policy != "decayed":
            return
        total = np.maximum(counts.sum(1, keepdims=True), 1e-9)
        horizon = tokens_per_step / (1 - self.settings.decay)
        self.score = counts / total * horizon * self.unit[:, None]

    def step(
        self, layer: int, workload: np.ndarray, arrived=(), costs: Costs | None = None
    ) -> list[Swap]:
        """Counts workload int64 [E] and returns the swaps it calls for, the most valuable first.
        arrived: experts whose bytes were copied to the device for this step."""
        s = self.settings
        n, m = rules.step(
            self.code,
            layer,
            workload,
            np.array(arrived, np.int64) if len(arrived) else NOBODY,
            self.frozen,
            s.decay,
            s.window,
            s.most,
            s.hysteresis,
            s.margin,
            self.resident,
            self.score,
            self.last,
            self.unit,
            self.clock,
            self._swaps,
            self._gains,
        )
        if m == 0:
            return []
        per_use = float(costs.c[1] - costs.g[1]) if costs is not None else 1.0
        found = zip(self._swaps[:m].tolist(), self._gains[:m].tolist())
        return [Swap(*pair, gain * per_use, i < n) for i, (pair, gain) in enumerate(found)]

    def expected_uses(self, layer: int, expert: int) -> float:
        """Tokens a step, from the decayed score."""
        return self.score[layer, expert] / self.unit[layer] * (1 - self.settings.decay)

    def started(self, layer: int, swap: Swap) -> bool:
        """The copy of a fill begins. False, and nothing is done, if residency has changed since."""
        if self.resident[layer, swap.load] or not self.resident[layer, swap.evict]:
            return False
        self.resident[layer, swap.evict] = 0
        return True

    def finished(self, layer: int, swap: Swap) -> None:
        self.resident[layer, swap.load] = 1


def hit_rates(
    workload: np.ndarray,
    resident: np.ndarray,
    settings: CacheSettings,
    counts: np.ndarray | None = None,
) -> dict[str, float]:
    """Replays workload [S, L, E] from residents [L, E], every fill done at once (no link).
    hits by expert and by token, fills per use. policy "belady" knows the future."""
    totals = np.zeros(5)
    if settings.policy == "belady":
        for layer in range(workload.shape[1]):
            rules.belady(np.ascontiguousarray(workload[:, layer]), resident[layer].copy(), totals)
    else:
        cache, s = ExpertCache(resident.copy(), settings), settings
        if counts is not None:
            cache.seed(counts, workload.sum(2).mean())
        for layer in range(workload.shape[1]):
            rules.replay(
                cache.code,
                layer,
                np.ascontiguousarray(workload[:, layer]),
                s.decay,
                s.window,
                s.most,
                s.hysteresis,
                s.margin,
                cache.resident,
                cache.score,
                cache.last,
                cache.unit,
                cache.clock,
                totals,
            )
    return {
        "by_expert": totals[0] / totals[1],
        "by_token": totals[2] / totals[3],
        "fills_per_use": totals[4] / totals[1],
    }
