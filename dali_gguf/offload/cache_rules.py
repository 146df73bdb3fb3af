"""The expert cache's rules as compiled functions; their fronts are cache.py and slot_pool.py.

State of all layers, shared by engine and simulator: resident uint8 [L, E], score float64 [L, E],
last int64 [L, E] (step of the last use, -1 never), unit float64 [L], clock int64 [L]. Scores decay
lazily: instead of multiplying every score by decay in each step, what is added grows by 1 / decay
(`unit`), and everything is divided back when unit gets large.
"""

import numpy as np
from numba import njit

STATIC, DECAYED, WORKLOAD, LRU, LFU, LFRU = range(6)
BIG = 1e12  # rescale beyond: float64 would overflow after 16,000 half-lives' worth of steps


@njit(cache=True, nogil=True)
def grow(score, unit, decay):
    """One step of decay for score (any shape): returns the new unit, rescaling when it is large."""
    unit /= decay
    if unit > BIG:
        flat = score.reshape(-1)
        for i in range(flat.size):
            flat[i] /= unit
        unit = 1.0
    return unit


@njit(cache=True, nogil=True)
def key(code, score, last, now):
    """Worth of keeping an expert: the lowest goes first. score, last: of that expert."""
    if code == LRU:
        return float(last)
    if code == LFRU:
        return score / (now - last)  # the clock already stands one past the step
    return score


@njit(cache=True, nogil=True)
def account(code, layer, workload, decay, score, last, unit, clock):
    """Counts one step: workload [E] tokens per expert. LRU, LFU and LFRU count uses, not tokens."""
    if code == DECAYED:
        unit[layer] = grow(score[layer], unit[layer], decay)
    for e in range(workload.size):
        if workload[e] > 0:
            last[layer, e] = clock[layer]
            by_use = code == LRU or code == LFU or code == LFRU
            score[layer, e] += unit[layer] * (1.0 if by_use else workload[e])
    clock[layer] += 1


@njit(cache=True, nogil=True)
def worst_resident(code, layer, resident, score, last, clock, workload, spare_used):
    """The resident expert with the lowest key (of those not used in this step if spare_used);
    -1 if there is none."""
    worst, low = -1, np.inf
    for e in range(resident.shape[1]):
        if resident[layer, e] and not (spare_used and workload[e] > 0):
            k = key(code, score[layer, e], last[layer, e], clock[layer])
            if k < low:
                worst, low = e, k
    return worst


@njit(cache=True, nogil=True)
def adopt(code, layer, workload, arrived, resident, score, last, clock, swaps, n):
    """Experts copied for computing (arrived uint8 [E]) take the slot of a worse resident, at once
    and for free. Appends (load, evict) to swaps int64 [E, 2] from n on; returns the new n."""
    if code == STATIC:
        return n
    for e in range(workload.size):
        if arrived[e] and not resident[layer, e]:
            v = worst_resident(code, layer, resident, score, last, clock, workload, True)
            if v < 0 or (code != LRU and not score[layer, e] > score[layer, v]):
                continue
            resident[layer, e], resident[layer, v] = 1, 0
            swaps[n, 0], swaps[n, 1] = e, v
            n += 1
    return n


@njit(cache=True, nogil=True)
def fills(
    code,
    layer,
    workload,
    window,
    most,
    hysteresis,
    margin,
    resident,
    score,
    last,
    unit,
    clock,
    swaps,
    n,
):
    """Copies worth making for later steps: appends (load, evict) to swaps, residency unchanged.

    LRU, LFU, LFRU: every miss, for the lowest resident not used now. decayed: up to `most` swaps
    whose score gains more than hysteresis and margin (expected uses that pay for a copy; as a sum
    of decayed uses) ask. workload: the same without either, every `window` steps, then scores
    start again."""
    if code == STATIC or (code == WORKLOAD and clock[layer] % window):
        return n
    here = np.empty(workload.size, np.uint8)
    for e in range(workload.size):
        here[e] = resident[layer, e]
    by_miss = code == LRU or code == LFU or code == LFRU
    for _ in range(workload.size if by_miss else most):
        load, evict, high, low = -1, -1, -np.inf, np.inf
        for e in range(workload.size):
            k = key(code, score[layer, e], last[layer, e], clock[layer])
            if here[e] == 1:
                if k < low and not (by_miss and workload[e] > 0):
                    evict, low = e, k
            elif here[e] == 0 and k > high and (workload[e] > 0 or not by_miss):
                load, high = e, k
        if load < 0 or evict < 0:
            break
        bar = hysteresis * score[layer, evict] + margin * unit[layer]
        if not by_miss and not score[layer, load] > bar:
            break
        here[load], here[evict] = 2, 3  # decided: neither candidate nor victim again
        swaps[n, 0], swaps[n, 1] = load, evict
        n += 1
    if code == WORKLOAD:
        for e in range(workload.size):
            score[layer, e] = 0.0
    return n


@njit(cache=True, nogil=True)
def decide(code, layer, workload, arrived, decay, window, most, hysteresis, margin, resident, score,
           last, unit, clock, swaps):
    """A step of a layer: its workload counts, experts that arrived (uint8 [E]) may be adopted, and
    fills are chosen. Returns (adopted, adopted and fills): rows of swaps."""
    account(code, layer, workload, decay, score, last, unit, clock)
    n = adopt(code, layer, workload, arrived, resident, score, last, clock, swaps, 0)
    m = fills(code, layer, workload, window, most, hysteresis, margin, resident, score, last, unit,
              clock, swaps, n)
    return n, m


@njit(cache=True)
def step(code, layer, workload, arrived, frozen, decay, window, most, hysteresis, margin, resident,
         score, last, unit, clock, swaps, gains):
    """decide for experts that arrived (int64 [n]); frozen: the workload counts, nothing moves.
    Returns the same, and in gains float64 [2 E] the expected uses a step that each swap adds."""
    if frozen or code == STATIC:
        account(code, layer, workload, decay, score, last, unit, clock)
        return 0, 0
    here = np.zeros(workload.size, np.uint8)
    for e in arrived:
        here[e] = 1
    n, m = decide(code, layer, workload, here, decay, window, most, hysteresis, margin, resident,
                  score, last, unit, clock, swaps)
    for i in range(m):
        gain = score[layer, swaps[i, 0]] - score[layer, swaps[i, 1]]
        gains[i] = gain / unit[layer] * (1 - decay)
    return n, m


@njit(cache=True, nogil=True)
def replay(
    code,
    layer,
    workload,
    decay,
    window,
    most,
    hysteresis,
    margin,
    resident,
    score,
    last,
    unit,
    clock,
    totals,
):
    """One layer's trace workload [S, E] with every fill done at once: a cache without a link, as
    caches are compared. Adds to totals float64 [5]: hits, uses, token hits, tokens, fills."""
    n_expert = workload.shape[1]
    swaps = np.empty((2 * n_expert, 2), np.int64)
    for s in range(workload.shape[0]):
        w = workload[s]
        for e in range(n_expert):
            if w[e] > 0:
                totals[1] += 1
                totals[3] += w[e]
                if resident[layer, e]:
                    totals[0] += 1
                    totals[2] += w[e]
        account(code, layer, w, decay, score, last, unit, clock)
        n = fills(
            code,
            layer,
            w,
            window,
            most,
            hysteresis,
            margin,
            resident,
            score,
            last,
            unit,
            clock,
            swaps,
            0,
        )
        for i in range(n):
            resident[layer, swaps[i, 0]], resident[layer, swaps[i, 1]] = 1, 0
        totals[4] += n


@njit(cache=True, nogil=True)
def belady(workload, resident, totals):
    """The same totals for the cache that knows the future: after each step it keeps, of the
    residents and the experts just used, those whose next use is nearest (bypass allowed; a
    resident wins a tie). workload [S, E], resident uint8 [E]."""
    n_step, n_expert = workload.shape
    capacity = resident.sum()
    following = np.empty((n_step, n_expert), np.int64)
    upcoming = np.full(n_expert, n_step + 1)
    for s in range(n_step - 1, -1, -1):
        following[s] = upcoming
        for e in range(n_expert):
            if workload[s, e] > 0:
                upcoming[e] = s
    for s in range(n_step):
        distance = np.full(n_expert, np.inf)
        for e in range(n_expert):
            if workload[s, e] > 0:
                totals[1] += 1
                totals[3] += workload[s, e]
                if resident[e]:
                    totals[0] += 1
                    totals[2] += workload[s, e]
            if workload[s, e] > 0 or resident[e]:
                distance[e] = following[s, e] - 0.5 * resident[e]
        keep = np.argsort(distance, kind="mergesort")
        was = resident.copy()
        resident[:] = 0
        for e in keep[:capacity]:
            if distance[e] < np.inf:
                resident[e] = 1
                totals[4] += not was[e]
