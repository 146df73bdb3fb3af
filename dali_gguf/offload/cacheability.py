"""Whether a model caches well: how concentrated and repetitive its routing is, hits by policy."""

import numpy as np

from dali_gguf.offload import cache, placement
from dali_gguf.offload import trace as traces
from dali_gguf.offload.cache import CacheSettings
from dali_gguf.offload.trace import Trace

POLICIES = ("static", "lru", "decayed", "belady")


def concentration(counts: np.ndarray, traffic: float = 0.95) -> float:
    """Share of the experts [L, E] that carry `traffic` of the tokens, mean over layers."""
    share = -np.sort(-counts / np.maximum(counts.sum(1, keepdims=True), 1), axis=1)
    needed = (np.cumsum(share, 1) < traffic).sum(1) + 1
    return float(np.minimum(needed, counts.shape[1]).mean() / counts.shape[1])


def reuse(trace: Trace) -> float:
    """How often a token's expert was also the token before's, over what the experts' popularity
    alone would give (1: no more than by chance)."""
    inside = np.setdiff1d(np.arange(1, len(trace.ids)), trace.starts)
    now, before = trace.ids[inside], trace.ids[inside - 1]
    again = (now[:, :, :, None] == before[:, :, None, :]).any(-1).mean((0, 2))
    share = trace.counts() / len(trace.ids)
    chance = (share**2).sum(1) / trace.n_used
    return float((again / chance).mean())


def hits(trace: Trace, slots: int) -> dict[str, float]:
    """Hit rates by expert at batch 1 with `slots` experts resident, learned from 40 % of the trace
    and measured on the rest."""
    calibration, evaluation = traces.split(trace)
    counts = calibration.counts()
    resident = placement.resident_hot(counts, slots)
    order = traces.decode_order(evaluation, 1)
    workload = traces.step_workload(traces.step_ids(evaluation.ids, order), trace.n_expert)
    return {
        name: float(cache.hit_rates(workload, resident, _settings(name), counts)["by_expert"])
        for name in POLICIES
    }


def _settings(name: str) -> CacheSettings:
    return CacheSettings(name) if name == "belady" else cache.settings(name)


def ids_from_counts(counts: np.ndarray, n_used: int, tokens: int, seed: int = 0) -> np.ndarray:
    """int16 [tokens, L, A] drawn by the counts [L, E] alone (no repetition from token to token)."""
    rng = np.random.default_rng(seed)
    weight = np.log(np.maximum(counts, 1e-3))
    noise = rng.gumbel(size=(tokens, *counts.shape))
    return np.argsort(-(weight + noise), axis=-1)[..., :n_used].astype(np.int16)
