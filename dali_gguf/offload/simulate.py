"""Replays a trace on a hardware profile under a policy. Everything that comes out is simulated."""

from dataclasses import dataclass, replace

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload import cache, event_sim, event_state, hardware_profile, placement
from dali_gguf.offload.cache import CacheSettings
from dali_gguf.offload.hardware_profile import Hardware, Shape
from dali_gguf.offload.trace import Trace

CONTEXT = 1024  # tokens in the KV cache of a decoding sequence
PREDICT_US = 2.0  # the stacked product of a prediction (routing and prediction in one)
GAP, AT_ROUTING = True, False
ROOM = 0.8  # a background copy starts only if this share of it fits before the next routing
FREE_LINK = 0.95  # above this r a copy does not slow the CPU: start at routing
RING = 16  # prefetches of a layer in prefill


@dataclass(frozen=True, slots=True)
class Policy:
    """resident: what starts in VRAM, whole "layers" or the "hot" experts. predictor: a name of
    prefetch.PREDICTORS; prefetch: copies a layer. most_fills: length of the fill queue."""

    name: str
    resident: str = "hot"
    placement: str = "threshold"
    cache: CacheSettings = CacheSettings("static")
    predictor: str = "none"
    prefetch: int = 0
    gap: bool = GAP
    room: float = ROOM
    most_fills: int = 8


def policies(
    expert_cache: str = "decayed",
    place: str = "threshold",
    predictor: str = "residual",
    prefetches: int = 2,
) -> list[Policy]:
    """The table that `simulate` prints: baselines, the paper's settings, and ours step by step."""
    chosen, paper = cache.settings(expert_cache), cache.settings("workload")
    slow = replace(paper, window=32, most=4)
    return [
        Policy("static-layers", "layers", "static-layers"),
        Policy("static-hot", "hot", "static-hot"),
        Policy("lru + copy", "hot", "all-gpu", cache.settings("lru"), gap=AT_ROUTING, room=0.0),
        Policy("paper (greedy, w4/u1)", "hot", "greedy", paper, "residual", 1, AT_ROUTING, 0.0),
        Policy("paper (greedy, w32/u4)", "hot", "greedy", slow, "residual", 1, AT_ROUTING, 0.0),
        Policy(place, "hot", place),
        Policy(f"+ {expert_cache} cache", "hot", place, chosen),
        Policy(f"+ prefetch {predictor}", "hot", place, chosen, predictor, prefetches),
    ]


def prefill_policies() -> list[Policy]:
    """Baselines: whole layers, the rest computed on the CPU or streamed; then hot experts."""
    return [
        Policy("static-layers, CPU", "layers", "static-layers"),
        Policy("static-layers, streamed", "layers", "all-gpu"),
        Policy("static-hot, CPU", "hot", "static-hot"),
        Policy("static-hot, streamed", "hot", "all-gpu"),
        Policy("paper (greedy)", "hot", "greedy"),
        Policy("threshold", "hot", "threshold"),
        Policy("+ ring of 16", "hot", "threshold", predictor="residual", prefetch=1),
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """What the replay prices: a machine, a model's sizes, and how much of the experts is in VRAM.
    prefill: the steps are prompts, the cache is frozen, a ring of copies runs ahead."""

    machine: Hardware
    model: Shape
    resident_share: float
    batch: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """Simulated figures of one run. tokens_per_s is for the model's full depth. Shares of time are
    of the whole step; cpu_both and gpu_both of the experts' part of layers where both work."""

    policy: str
    tokens_per_s: float
    hit_rate: float
    token_hit_rate: float
    prefetch_accuracy: float
    prefetch_late: float
    gigabytes_per_step: float
    cpu_share: float
    gpu_share: float
    link_share: float
    cpu_both: float
    gpu_both: float
    imbalance: float
    moe_us_per_layer: float
    log: np.ndarray


def share_of_budget(machine: Hardware, model: Shape, vram: float | None, batch: int) -> float:
    """Share of all experts that fit beside the dense weights, KV cache and a ring of slots."""
    vram = machine.vram if vram is None else vram
    kv = model.kv_bytes * model.n_layer * CONTEXT * batch
    room = vram - model.dense_bytes - kv - (RING * model.expert_bytes) - 0.3e9
    share = room / (model.n_layer * model.n_expert * model.expert_bytes)
    if share <= 0:
        need = model.dense_bytes + kv + 0.3e9 + RING * model.expert_bytes
        raise InputError(
            f"--vram {vram / 1e9:.1f} GB holds no expert of {model.name}: expected more "
            f"than {need / 1e9:.1f} GB for dense weights, KV cache and buffers"
        )
    return min(share, 1.0)


def start_residents(policy: Policy, counts: np.ndarray, share: float) -> np.ndarray:
    """uint8 [L, E]: floor(share of all experts) resident, by layer or by count."""
    n_layer, n_expert = counts.shape
    slots = int(share * n_layer * n_expert + 1e-9)
    if policy.resident == "layers":
        return placement.resident_layers(n_layer, n_expert, slots)
    return placement.resident_hot(counts, slots)


def simulate(
    policy: Policy,
    setting: Setting,
    ids: np.ndarray,
    predicted: np.ndarray,
    counts: np.ndarray,
    log_step: int = -1,
) -> Result:
    """ids, predicted int16 [S, L, N] (trace.step_ids), counts int64 [L, E] of the calibration part
    (what is resident at the start, and the scores)."""
    machine, model = setting.machine, setting.model
    costs = hardware_profile.costs(machine, model, max(ids.shape[2], 1))
    run = _run(policy, setting, ids.shape[1], costs, log_step)
    resident = start_residents(policy, counts, setting.resident_share)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    seeded = policy.cache.policy == "decayed"
    score = share * ids.shape[2] / (1 - policy.cache.decay) if seeded else np.zeros(counts.shape)
    state = event_state.new_state(resident, score)
    step_time = np.zeros(len(ids))
    event_sim.simulate(run, state, ids, predicted, costs.c, costs.g, step_time)
    return _result(policy, setting, state, ids.shape)


def _run(policy: Policy, setting: Setting, n_layer: int, costs, log_step: int) -> event_state.Run:
    machine, model, s = setting.machine, setting.model, policy.cache
    frozen = setting.prefill
    tokens = setting.batch
    context = tokens // 2 if setting.prefill else CONTEXT
    return event_state.Run(
        placement=placement.policy_code(policy.placement),
        place_margin=0.0,
        cache=0 if frozen else cache.POLICIES.index(s.policy),
        decay=s.decay,
        window=s.window,
        most=s.most,
        hysteresis=s.hysteresis,
        cache_margin=s.margin,
        most_fills=0 if frozen else policy.most_fills,
        prefetch=RING if frozen and policy.prefetch else policy.prefetch,
        gap=policy.gap and machine.r <= FREE_LINK,
        room=policy.room,
        t=costs.t,
        r=machine.r,
        plan_r=machine.r,
        h_cpu=machine.h_cpu,
        attention=hardware_profile.attention_us(machine, model, tokens, context, setting.prefill),
        routing=machine.routing,
        # the trace may have fewer layers than the priced model: its share of the head
        head=hardware_profile.head_us(machine, model, 1 if setting.prefill else tokens)
        * n_layer
        / model.n_layer,
        predict=PREDICT_US,
        log_step=log_step,
    )


def _result(policy: Policy, setting: Setting, state: event_state.State, shape: tuple) -> Result:
    total = dict(zip(event_state.TOTALS, state.totals.tolist()))
    steps, n_layer, _ = shape
    time, moved = total["time"], total["copies"] + total["prefetched"] + total["fills"]
    depth = setting.model.n_layer / n_layer
    both = max(total["both"], 1)
    return Result(
        policy.name,
        1e6 * setting.batch * steps / (time * depth),
        total["hits"] / total["uses"],
        total["token_hits"] / total["tokens"],
        total["useful"] / max(total["prefetched"], 1),
        total["late"] / max(total["prefetched"], 1),
        moved * setting.model.expert_bytes * depth / steps / 1e9,
        total["cpu"] / time,
        total["gpu"] / time,
        total["link"] / time,
        total["both_cpu"] / max(total["both_span"], 1e-9),
        total["both_gpu"] / max(total["both_span"], 1e-9),
        total["imbalance"] / both,
        total["moe"] / (steps * n_layer),
        state.log[: int(state.at[event_state.N_LOG])].copy(),
    )


def shape_of(trace: Trace, name: str = "") -> Shape:
    """The trace's own model as a Shape; attention sizes are estimated from n_embd (4 D^2 weights,
    two bytes of keys and values per dimension)."""
    if not (trace.n_embd and trace.n_ff_exp):
        raise InputError("the trace does not say its model's sizes: add --scale-to qwen3-30b")
    d = trace.n_embd
    bits = 8 * trace.expert_bytes / (3 * d * trace.n_ff_exp)
    attention = 4.0 * d * d
    return Shape(
        name or trace.model or "trace",
        trace.n_layer,
        trace.n_expert,
        trace.n_used,
        d,
        trace.n_ff_exp,
        bits,
        attention,
        attention * 0.6,
        4.0 * d,
        32000 * d * 0.8,
    )
