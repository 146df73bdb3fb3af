"""Event simulation of decoding or prefill: CPU, GPU, link and shared DRAM, a barrier per layer.

The same compiled rules as the engine decide (placement_rules, cache_rules). Per layer: attention on
the GPU; the routing; misses and residents are placed; demanded copies take the link at once; CPU
and GPU work side by side and the slower one ends the layer. Background copies (prefetches for the
next layer, then cache fills) take the link when it is idle: from routing on, or, with `gap`, only
when the CPU part of the layer is done, and only if `room` of a copy fits before the next routing.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from dali_gguf.offload import cache_rules, placement_rules

QUEUE = 64
TOTALS = ("time", "uses", "hits", "tokens", "token_hits", "prefetched", "useful", "late", "fills",
          "adopted", "copies", "cpu", "gpu", "link", "cpu_experts", "both", "both_span", "both_cpu",
          "both_gpu", "imbalance", "moe", "cpu_critical", "warm_time")
(TIME, USES, HITS, TOKENS, TOKEN_HITS, PREFETCHED, USEFUL, LATE, FILLS, ADOPTED, COPIES, CPU, GPU,
 LINK, CPU_EXPERTS, BOTH, BOTH_SPAN, BOTH_CPU, BOTH_GPU, IMBALANCE, MOE, CPU_CRITICAL,
 WARM_TIME) = range(len(TOTALS))
NOW, LINK_FREE, OPEN, FLIGHT_LAYER, FLIGHT_EXPERT, N_PRE, N_FILL, N_LOG = range(8)
LOG_ATTENTION, LOG_CPU, LOG_GPU, LOG_DEMAND, LOG_PREFETCH, LOG_FILL = range(6)


class Run(NamedTuple):
    """What a simulation run fixes. Times in microseconds.

    placement, cache: codes of the rules. plan_r: the contention the planner believes in. prefetch:
    how many a layer. most_fills: length of the fill queue (0: only adoption). attention, head: per
    layer, per step; routing: added in layers that are not wholly resident; predict: in layers that
    prefetch. log_step: the step whose events are logged, -1 for none."""

    placement: int
    place_margin: float
    cache: int
    decay: float
    window: int
    most: int
    hysteresis: float
    cache_margin: float
    most_fills: int
    prefetch: int
    gap: bool
    room: float
    t: float
    r: float
    plan_r: float
    h_cpu: float
    attention: float
    routing: float
    head: float
    predict: float
    log_step: int


class State(NamedTuple):
    """Arrays a run changes: the cache's (cache_rules), prefetched uint8 [E] for the coming layer,
    the queues int64 [QUEUE, 3] (layer, load, evict), clocks float64 [8], totals, the log."""

    resident: np.ndarray
    score: np.ndarray
    last: np.ndarray
    unit: np.ndarray
    clock: np.ndarray
    prefetched: np.ndarray
    queued: np.ndarray
    pre: np.ndarray
    fill: np.ndarray
    at: np.ndarray
    totals: np.ndarray
    log: np.ndarray


def new_state(resident: np.ndarray, score: np.ndarray) -> State:
    """resident uint8 [L, E] and starting scores float64 [L, E] are copied."""
    n_layer, n_expert = resident.shape
    return State(
        resident.astype(np.uint8).copy(), score.astype(np.float64).copy(),
        np.full((n_layer, n_expert), -1, np.int64), np.ones(n_layer), np.zeros(n_layer, np.int64),
        np.zeros(n_expert, np.uint8), np.zeros((n_layer, n_expert), np.uint8),
        np.zeros((QUEUE, 3), np.int64), np.zeros((QUEUE, 3), np.int64), np.zeros(8),
        np.zeros(len(TOTALS)), np.zeros((512, 4)),
    )


@njit(cache=True, nogil=True)
def _log(run, state, step, kind, layer, start, end):
    n = int(state.at[N_LOG])
    if step == run.log_step and n < state.log.shape[0] and end > start:
        state.log[n, 0], state.log[n, 1], state.log[n, 2], state.log[n, 3] = kind, layer, start, end
        state.at[N_LOG] += 1


@njit(cache=True, nogil=True)
def _pop(queue, at, length):
    """Drops the first row of a queue whose length is at[length]."""
    n = int(at[length]) - 1
    for i in range(n):
        queue[i] = queue[i + 1]
    at[length] = n


@njit(cache=True, nogil=True)
def _finish_fill(run, state, layer, load, evict):
    """The slot of `evict` (or, if that left meanwhile, of the worst resident) takes `load`."""
    state.queued[layer, load] = 0
    if state.resident[layer, load]:
        return False
    if not state.resident[layer, evict]:
        evict = cache_rules.worst_resident(run.cache, layer, state.resident, state.score, state.last,
                                           state.clock, state.queued[layer], False)
    if evict < 0:
        return False
    state.resident[layer, evict], state.resident[layer, load] = 0, 1
    state.totals[FILLS] += 1
    return True


@njit(cache=True, nogil=True)
def background(run, state, step, layer, until):
    """Starts queued copies on the idle link before `until` (the routing of `layer`)."""
    at = state.at
    while at[LINK_FREE] < until and at[N_PRE] + at[N_FILL] > 0:
        prefetch = at[N_PRE] > 0
        queue = state.pre if prefetch else state.fill
        start = max(at[LINK_FREE], at[OPEN])
        if start >= until or start + run.room * run.t > until:
            break
        owner, load, evict = queue[0, 0], queue[0, 1], queue[0, 2]
        _pop(queue, at, N_PRE if prefetch else N_FILL)
        if prefetch:
            if state.resident[owner, load] or state.prefetched[load]:
                continue
            state.totals[PREFETCHED] += 1
            if start + run.t <= until:
                state.prefetched[load] = 1
            else:
                at[FLIGHT_LAYER], at[FLIGHT_EXPERT] = owner, load
        elif not _finish_fill(run, state, owner, load, evict):
            continue
        at[LINK_FREE] = start + run.t
        state.totals[LINK] += run.t
        _log(run, state, step, LOG_PREFETCH if prefetch else LOG_FILL, layer, start, start + run.t)


@njit(cache=True, nogil=True)
def _arrivals(run, state, layer, workload, here, c, g, busy):
    """here uint8 [E]: residents, prefetched, and the one in flight if waiting beats the CPU.
    Counts uses and hits. Returns the time the GPU cannot finish before."""
    floor = 0.0
    totals = state.totals
    for e in range(workload.size):
        here[e] = state.resident[layer, e]
        w = workload[e]
        if w == 0:
            continue
        totals[USES] += 1
        totals[TOKENS] += w
        totals[HITS] += here[e]
        totals[TOKEN_HITS] += w * here[e]
        if here[e]:
            continue
        if state.prefetched[e]:
            totals[USEFUL] += 1
            here[e] = 1
        elif state.at[FLIGHT_LAYER] == layer and state.at[FLIGHT_EXPERT] == e:
            totals[LATE] += 1
            if busy < c[w]:
                here[e], state.prefetched[e] = 1, 1
                floor = busy + g[w]
    state.at[FLIGHT_LAYER] = -1
    return floor


@njit(cache=True, nogil=True)
def _enqueue_fills(run, state, layer, workload, arrived, swaps):
    """The cache's step: scores, adoption, and the fill queue."""
    args = (state.resident, state.score, state.last)
    cache_rules.account(run.cache, layer, workload, run.decay, state.score, state.last, state.unit,
                        state.clock)
    n = cache_rules.adopt(run.cache, layer, workload, arrived, *args, state.clock, swaps, 0)
    state.totals[ADOPTED] += n
    m = cache_rules.fills(run.cache, layer, workload, run.window, run.most, run.hysteresis,
                          run.cache_margin, *args, state.unit, state.clock, swaps, n)
    if run.cache == cache_rules.DECAYED or m > n:  # a new decision replaces the layer's old ones
        i = 0
        while i < state.at[N_FILL]:
            if state.fill[i, 0] == layer and run.cache <= cache_rules.WORKLOAD:
                state.queued[layer, state.fill[i, 1]] = 0
                for j in range(i, int(state.at[N_FILL]) - 1):
                    state.fill[j] = state.fill[j + 1]
                state.at[N_FILL] -= 1
            else:
                i += 1
    for i in range(n, m):
        row = int(state.at[N_FILL])
        if row < min(run.most_fills, QUEUE) and not state.queued[layer, swaps[i, 0]]:
            state.fill[row, 0] = layer
            state.fill[row, 1], state.fill[row, 2] = swaps[i, 0], swaps[i, 1]
            state.queued[layer, swaps[i, 0]] = 1
            state.at[N_FILL] += 1


@njit(cache=True, nogil=True)
def _enqueue_prefetch(run, state, layer, predicted, counts):
    """The `prefetch` absent experts of `layer` with the largest predicted workload."""
    counts[:] = 0
    for e in predicted:
        counts[e] += 1
    state.at[N_PRE] = 0
    for _ in range(min(run.prefetch, QUEUE)):
        best = -1
        for e in range(counts.size):
            if counts[e] > 0 and not state.resident[layer, e]:
                if best < 0 or counts[e] > counts[best]:
                    best = e
        if best < 0:
            break
        counts[best] = 0
        row = int(state.at[N_PRE])
        state.pre[row, 0], state.pre[row, 1], state.pre[row, 2] = layer, best, -1
        state.at[N_PRE] += 1


@njit(cache=True, nogil=True)
def _cpu_work(scratch, n_cpu, workload, c):
    work = 0.0
    for i in range(n_cpu):
        work += c[min(workload[scratch[0, i]], c.size - 1)]
    return work


@njit(cache=True, nogil=True)
def _gpu_end(run, scratch, n_gpu, n_copy, workload, g, busy):
    gpu, link, top = 0.0, busy, g.size - 1
    for i in range(n_gpu):
        gpu += g[min(workload[scratch[1, i]], top)]
    for i in range(n_copy):
        link += run.t
        gpu = max(gpu, link) + g[min(workload[scratch[2, i]], top)]
    return gpu


@njit(cache=True, nogil=True)
def _account_layer(run, state, step, layer, cpu, gpu, n_cpu, n_other, start):
    """Busy times, balance where both sides had experts, log."""
    totals, span = state.totals, max(cpu, gpu)
    totals[CPU] += cpu
    totals[GPU] += gpu
    totals[MOE] += span
    totals[CPU_EXPERTS] += n_cpu
    totals[CPU_CRITICAL] += cpu > gpu
    if n_cpu and n_other:
        totals[BOTH] += 1
        totals[BOTH_SPAN] += span
        totals[BOTH_CPU] += cpu
        totals[BOTH_GPU] += gpu
        totals[IMBALANCE] += abs(cpu - gpu) / span
    _log(run, state, step, LOG_CPU, layer, start, start + cpu)
    _log(run, state, step, LOG_GPU, layer, start, start + gpu)


@njit(cache=True, nogil=True)
def simulate(run, state, ids, predicted, c, g, step_time):
    """Replays ids [S, L, N] (predicted: the same shape, row l = prediction for layer l). Fills
    state.totals and step_time float64 [S]."""
    n_step, n_layer, _ = ids.shape
    n_expert, at = state.resident.shape[1], state.at
    scratch, swaps = np.empty((9, n_expert), np.int64), np.empty((2 * n_expert, 2), np.int64)
    workload, counts = np.zeros(n_expert, np.int64), np.zeros(n_expert, np.int64)
    here, arrived = np.zeros(n_expert, np.uint8), np.zeros(n_expert, np.uint8)
    at[FLIGHT_LAYER] = -1
    for s in range(n_step):
        begin = at[NOW]
        for layer in range(n_layer):
            workload[:] = 0
            for e in ids[s, layer]:
                workload[e] += 1
            whole = run.cache == cache_rules.STATIC and state.resident[layer].all()
            ahead = run.prefetch > 0 and layer + 1 < n_layer
            routed = at[NOW] + run.attention + (0.0 if whole else run.routing)
            routed += run.predict if ahead else 0.0
            _log(run, state, s, LOG_ATTENTION, layer, at[NOW], routed)
            background(run, state, s, layer, routed)
            busy = max(at[LINK_FREE] - routed, 0.0)
            floor = _arrivals(run, state, layer, workload, here, c, g, busy)
            n_cpu, n_gpu, n_copy, _ = placement_rules.plan_layer(
                run.placement, workload, here, c, g, run.t, busy, run.plan_r, run.h_cpu,
                run.place_margin, scratch)
            gpu = max(_gpu_end(run, scratch, n_gpu, n_copy, workload, g, busy), floor)
            arrived[:] = state.prefetched
            state.prefetched[:] = 0
            for i in range(n_copy):
                arrived[scratch[2, i]] = 1
            for e in range(n_expert):
                arrived[e] &= workload[e] > 0
            if n_copy:
                at[LINK_FREE] = routed + busy + n_copy * run.t
                state.totals[LINK] += n_copy * run.t
                state.totals[COPIES] += n_copy
                _log(run, state, s, LOG_DEMAND, layer, routed + busy, at[LINK_FREE])
            if run.cache != cache_rules.STATIC:
                _enqueue_fills(run, state, layer, workload, arrived, swaps)
            if ahead:
                _enqueue_prefetch(run, state, layer + 1, predicted[s, layer + 1], counts)
            link = max(at[LINK_FREE] - routed, 0.0)
            if not run.gap:
                link += (at[N_PRE] + at[N_FILL]) * run.t
            cpu = placement_rules.cpu_finish(_cpu_work(scratch, n_cpu, workload, c), link, run.r,
                                             run.h_cpu)
            _account_layer(run, state, s, layer, cpu, gpu, n_cpu, n_gpu + n_copy, routed)
            at[OPEN] = routed + cpu if run.gap else routed
            at[NOW] = routed + max(cpu, gpu)
        at[NOW] += run.head
        step_time[s] = at[NOW] - begin
        state.totals[WARM_TIME] += step_time[s] if s >= n_step // 2 else 0.0
    state.totals[TIME] = at[NOW]
