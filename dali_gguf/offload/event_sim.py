"""Event simulation of decoding or prefill: CPU, GPU, link and shared DRAM, a barrier per layer.

The same compiled rules as the engine decide (placement_rules, cache_rules). Per layer: attention on
the GPU; the routing; misses and residents are placed; demanded copies take the link at once; CPU
and GPU work side by side and the slower one ends the layer. Background copies (prefetches for the
next layer, then cache fills) take the link when it is idle: from routing on, or, with `gap`, only
when the CPU part of the layer is done, and only if `room` of a copy fits before the next routing.
"""

import numpy as np
from numba import njit

from dali_gguf.offload import cache_rules, placement_rules
from dali_gguf.offload import event_state as st


@njit(cache=True, nogil=True)
def _finish_fill(run, state, layer, load, evict):
    """The slot of `evict` (or, if that left meanwhile, of the worst resident) takes `load`."""
    state.queued[layer, load] = 0
    if state.resident[layer, load]:
        return False
    if not state.resident[layer, evict]:
        evict = cache_rules.worst_resident(
            run.cache,
            layer,
            state.resident,
            state.score,
            state.last,
            state.clock,
            state.queued[layer],
            False,
        )
    if evict < 0:
        return False
    state.resident[layer, evict], state.resident[layer, load] = 0, 1
    state.totals[st.FILLS] += 1
    return True


@njit(cache=True, nogil=True)
def background(run, state, step, layer, until):
    """Starts queued copies on the idle link before `until` (the routing of `layer`)."""
    at = state.at
    while at[st.LINK_FREE] < until and at[st.N_PRE] + at[st.N_FILL] > 0:
        prefetch = at[st.N_PRE] > 0
        queue = state.pre if prefetch else state.fill
        start = max(at[st.LINK_FREE], at[st.OPEN])
        if start >= until or start + run.room * run.t > until:
            break
        owner, load, evict = queue[0, 0], queue[0, 1], queue[0, 2]
        st.drop(queue, 0, at, st.N_PRE if prefetch else st.N_FILL)
        if prefetch:
            if state.resident[owner, load] or state.prefetched[load]:
                continue
            state.totals[st.PREFETCHED] += 1
            if start + run.t <= until:
                state.prefetched[load] = 1
            else:
                at[st.FLIGHT_LAYER], at[st.FLIGHT_EXPERT] = owner, load
        elif not _finish_fill(run, state, owner, load, evict):
            continue
        at[st.LINK_FREE] = start + run.t
        state.totals[st.LINK] += run.t
        st.note(
            state.log,
            at,
            step == run.log_step,
            st.LOG_PREFETCH if prefetch else st.LOG_FILL,
            layer,
            start,
            start + run.t,
        )


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
        totals[st.USES] += 1
        totals[st.TOKENS] += w
        totals[st.HITS] += here[e]
        totals[st.TOKEN_HITS] += w * here[e]
        if here[e]:
            continue
        if state.prefetched[e]:
            totals[st.USEFUL] += 1
            here[e] = 1
        elif state.at[st.FLIGHT_LAYER] == layer and state.at[st.FLIGHT_EXPERT] == e:
            totals[st.LATE] += 1
            if busy < c[w]:
                here[e], state.prefetched[e] = 1, 1
                floor = busy + g[w]
    state.at[st.FLIGHT_LAYER] = -1
    return floor


@njit(cache=True, nogil=True)
def _enqueue_fills(run, state, layer, workload, arrived, swaps):
    """The cache's step: scores, adoption, and the fill queue."""
    n, m = cache_rules.decide(
        run.cache, layer, workload, arrived, run.decay, run.window, run.most, run.hysteresis,
        run.cache_margin, state.resident, state.score, state.last, state.unit, state.clock, swaps,
    )  # fmt: skip
    state.totals[st.ADOPTED] += n
    if run.cache == cache_rules.DECAYED or m > n:  # a new decision replaces the layer's old ones
        i = 0
        while i < state.at[st.N_FILL]:
            if state.fill[i, 0] == layer and run.cache <= cache_rules.WORKLOAD:
                state.queued[layer, state.fill[i, 1]] = 0
                st.drop(state.fill, i, state.at, st.N_FILL)
            else:
                i += 1
    for i in range(n, m):
        row = int(state.at[st.N_FILL])
        if row < min(run.most_fills, st.QUEUE) and not state.queued[layer, swaps[i, 0]]:
            state.fill[row, 0] = layer
            state.fill[row, 1], state.fill[row, 2] = swaps[i, 0], swaps[i, 1]
            state.queued[layer, swaps[i, 0]] = 1
            state.at[st.N_FILL] += 1


@njit(cache=True, nogil=True)
def _enqueue_prefetch(most, resident, pre, at, layer, predicted, counts):
    """The `most` absent experts of `layer` with the largest predicted workload."""
    for e in range(counts.size):
        counts[e] = 0
    for e in predicted:
        counts[e] += 1
    at[st.N_PRE] = 0
    for _ in range(min(most, st.QUEUE)):
        best = -1
        for e in range(counts.size):
            if counts[e] > 0 and not resident[layer, e]:
                if best < 0 or counts[e] > counts[best]:
                    best = e
        if best < 0:
            break
        counts[best] = 0
        row = int(at[st.N_PRE])
        pre[row, 0], pre[row, 1], pre[row, 2] = layer, best, -1
        at[st.N_PRE] += 1


@njit(cache=True, nogil=True)
def _cpu_work(scratch, n_cpu, workload, c):
    work = 0.0
    for i in range(n_cpu):
        work += c[min(workload[scratch[0, i]], c.size - 1)]
    return work


@njit(cache=True, nogil=True)
def _gpu_end(t, scratch, n_gpu, n_copy, workload, g, busy):
    gpu, link, top = 0.0, busy, g.size - 1
    for i in range(n_gpu):
        gpu += g[min(workload[scratch[1, i]], top)]
    for i in range(n_copy):
        link += t
        gpu = max(gpu, link) + g[min(workload[scratch[2, i]], top)]
    return gpu


@njit(cache=True, nogil=True)
def _count_tokens(run, state, layer, ids, workload):
    """Fills workload int64 [E] from ids [N]; returns whether no routing has to be waited for."""
    whole = run.cache == cache_rules.STATIC
    for e in range(workload.size):
        workload[e] = 0
        whole &= state.resident[layer, e] != 0
    for e in ids:
        workload[e] += 1
    return whole


@njit(cache=True, nogil=True)
def _demand(run, state, wanted, layer, routed, busy, workload, scratch, n_copy, arrived):
    """Copies of the plan in scratch; arrived uint8 [E]: what the cache may adopt."""
    at = state.at
    for e in range(workload.size):
        arrived[e] = state.prefetched[e] and workload[e] > 0
        state.prefetched[e] = 0
    for i in range(n_copy):
        arrived[scratch[2, i]] = 1
    if n_copy:
        at[st.LINK_FREE] = routed + busy + n_copy * run.t
        state.totals[st.LINK] += n_copy * run.t
        state.totals[st.COPIES] += n_copy
        st.note(state.log, at, wanted, st.LOG_DEMAND, layer, routed + busy, at[st.LINK_FREE])


@njit(cache=True, nogil=True)
def _compute(run, state, wanted, layer, routed, work, gpu, n_cpu, n_other):
    """Both sides compute until their barrier; then the link is open to guesses and fills."""
    at = state.at
    link = max(at[st.LINK_FREE] - routed, 0.0)
    if not run.gap:
        link += (at[st.N_PRE] + at[st.N_FILL]) * run.t
    cpu = placement_rules.cpu_finish(work, link, run.r, run.h_cpu)
    st.account_layer(state.totals, cpu, gpu, n_cpu, n_other)
    st.note(state.log, at, wanted, st.LOG_CPU, layer, routed, routed + cpu)
    st.note(state.log, at, wanted, st.LOG_GPU, layer, routed, routed + gpu)
    at[st.OPEN] = routed + cpu if run.gap else routed
    at[st.NOW] = routed + max(cpu, gpu)


@njit(cache=True, nogil=True)
def _layer(run, state, step, layer, ids, predicted, c, g, space):
    """One layer of a step. ids, predicted [L, N] of the step; space: arrays to work in."""
    scratch, swaps, workload, counts, here, arrived = space
    at, wanted = state.at, step == run.log_step
    whole = _count_tokens(run, state, layer, ids[layer], workload)
    ahead = run.prefetch > 0 and layer + 1 < ids.shape[0]
    routed = at[st.NOW] + run.attention + (0.0 if whole else run.routing)
    routed += run.predict if ahead else 0.0
    st.note(state.log, at, wanted, st.LOG_ATTENTION, layer, at[st.NOW], routed)
    background(run, state, step, layer, routed)
    busy = max(at[st.LINK_FREE] - routed, 0.0)
    floor = _arrivals(run, state, layer, workload, here, c, g, busy)
    n_cpu, n_gpu, n_copy, _ = placement_rules.plan_layer(
        run.placement,
        True,
        workload,
        here,
        c,
        g,
        run.t,
        busy,
        run.plan_r,
        run.h_cpu,
        run.place_margin,
        scratch,
    )
    gpu = max(_gpu_end(run.t, scratch, n_gpu, n_copy, workload, g, busy), floor)
    _demand(run, state, wanted, layer, routed, busy, workload, scratch, n_copy, arrived)
    if run.cache != cache_rules.STATIC:
        _enqueue_fills(run, state, layer, workload, arrived, swaps)
    if ahead:
        guessed = predicted[layer + 1]
        _enqueue_prefetch(run.prefetch, state.resident, state.pre, at, layer + 1, guessed, counts)
    work = _cpu_work(scratch, n_cpu, workload, c)
    _compute(run, state, wanted, layer, routed, work, gpu, n_cpu, n_gpu + n_copy)


@njit(cache=True, nogil=True)
def simulate(run, state, ids, predicted, c, g, step_time):
    """Replays ids [S, L, N] (predicted: the same shape, row l = prediction for layer l). Fills
    state.totals and step_time float64 [S]."""
    n_step, n_layer, _ = ids.shape
    n_expert, at = state.resident.shape[1], state.at
    space = (
        np.empty((9, n_expert), np.int64),
        np.empty((2 * n_expert, 2), np.int64),
        np.zeros(n_expert, np.int64),
        np.zeros(n_expert, np.int64),
        np.zeros(n_expert, np.uint8),
        np.zeros(n_expert, np.uint8),
    )
    at[st.FLIGHT_LAYER] = -1
    for s in range(n_step):
        begin = at[st.NOW]
        for layer in range(n_layer):
            _layer(run, state, s, layer, ids[s], predicted[s], c, g, space)
        at[st.NOW] += run.head
        step_time[s] = at[st.NOW] - begin
        state.totals[st.WARM_TIME] += step_time[s] if s >= n_step // 2 else 0.0
    state.totals[st.TIME] = at[st.NOW]
