"""Tokens per second of a plan, predicted from the costs that calibrate stored."""

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.offload import cacheability, event_sim, event_state, placement
from dali_gguf.offload.cache import POLICIES, CacheSettings
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.cost_store import Profile

TOKENS = 256  # drawn from counts where there is no trace


def cpu_rate(profile: Profile, n_layer: int, n_used: int) -> float:
    """Tokens/s of decoding on the CPU alone: the rest of a step, and each layer's experts."""
    layer = profile.h_cpu + n_used * profile.cpu_us[0]
    return 1e6 / (profile.dense_us + n_layer * layer)


def gpu_rate(
    profile: Profile,
    slots: np.ndarray,
    n_expert: int,
    n_used: int,
    ids: np.ndarray | None,
    counts: np.ndarray | None,
) -> float:
    """Tokens/s of decoding with slots int64 [L] experts of each layer on the GPU: the event
    simulation of threshold placement and the decayed cache on a trace's ids [T, L, A], or on
    routing drawn from counts [L, E] (None: uniform). Attention and the rest count as on the CPU:
    pessimistic."""
    n_layer = len(slots)
    if counts is None:
        counts = np.ones((n_layer, n_expert))
    if ids is None:
        ids = cacheability.ids_from_counts(counts, n_used, TOKENS)
    resident = np.zeros((n_layer, n_expert), np.uint8)
    for layer, n in enumerate(slots.tolist()):
        resident[layer, np.argsort(-counts[layer], kind="stable")[:n]] = 1
    costs = profile.model().costs
    cache = CacheSettings()
    score = counts / counts.sum(1, keepdims=True) * n_used / (1 - cache.decay)
    state = event_state.new_state(resident, score)
    run = _run(costs, cache, profile.dense_us / n_layer)
    event_sim.simulate(
        run, state, np.ascontiguousarray(ids, np.int16), ids, costs.c, costs.g, np.zeros(len(ids))
    )
    return 1e6 * len(ids) / float(state.totals[event_state.TIME])


def _run(costs: Costs, cache: CacheSettings, attention: float) -> event_state.Run:
    return event_state.Run(
        placement=placement.policy_code("threshold"),
        place_margin=placement.MARGIN,
        cache=POLICIES.index(cache.policy),
        decay=cache.decay,
        window=cache.window,
        most=cache.most,
        hysteresis=cache.hysteresis,
        cache_margin=cache.margin,
        most_fills=8,
        prefetch=0,
        gap=True,
        room=0.8,
        t=costs.t,
        r=costs.r,
        plan_r=costs.r,
        h_cpu=costs.h_cpu,
        attention=attention,
        routing=0.0,
        head=0.0,
        predict=0.0,
        log_step=-1,
    )


def line(
    profile: Profile, config: ModelConfig, card, ids: np.ndarray | None, counts: np.ndarray | None
) -> str:
    """The predicted speeds, and what they were taken from."""
    e = config.experts
    n_layer = config.n_layer if card is None else len(card.slots)
    text = f"speed: {cpu_rate(profile, n_layer, e.n_used):.1f} tokens/s predicted on the CPU alone"
    if card is None or not profile.gpu_us:
        return text + " (decode, from the stored profile)"
    rate = gpu_rate(profile, card.slots, e.n_expert, e.n_used, ids, counts)
    source = "trace" if ids is not None else "stored counts" if counts is not None else "uniform"
    return f"{text}, {rate:.1f} with this GPU memory (decode, stored profile, routing: {source})"
