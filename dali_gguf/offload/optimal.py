"""The exact placement of one layer: a branch and bound over (copies, CPU work, GPU finish).

Experts are decided one by one, residents first, then misses by workload descending (Johnson's order
of the flow shop). A state keeps what matters for the rest: copies so far, CPU work, GPU finish.
States that another one beats in both are dropped, and so are states whose bound is above the best
known answer. For tests and simulation: up to a second, where threshold takes a microsecond.
"""

import numpy as np
from numba import njit

from dali_gguf.offload import placement_rules as rules
from dali_gguf.offload.cost import Costs

LAMBDAS = 13  # weights tried for the bound
WORDS = 4  # assignments are bit masks of up to 256 experts
MOST = 1 << 16  # states; beyond, nearly equal states merge (relative 1e-5: then near-exact)


def solve(miss: np.ndarray, res: np.ndarray, costs: Costs, link_busy: float):
    """(to_gpu int64 [n_miss + n_res], makespan us) for workloads sorted descending."""
    to_gpu = np.empty(miss.size + res.size, np.int64)
    args = (costs.c, costs.g, costs.t, link_busy, costs.r, costs.h_cpu)
    best = np.inf
    for code in (rules.THRESHOLD, rules.GREEDY, rules.BALANCE, rules.ALL_CPU, rules.ALL_GPU):
        trial = np.empty_like(to_gpu)
        span = rules.assign(code, miss, miss.size, res, res.size, *args, 0.0, trial)
        if span < best:
            best, to_gpu = span, trial
    found = _search(miss, res, *args, best)
    if found[0] < best:
        bits = found[1]
        order = np.r_[miss.size + np.arange(res.size), np.arange(miss.size)]
        for i, place in enumerate(order):
            to_gpu[place] = (int(bits[i // 64]) >> (i % 64)) & 1
        best = found[0]
    return to_gpu, float(best)


@njit(cache=True)
def _bounds(w, is_miss, c, g, t):
    """Lagrangian bounds of what experts i.. must still add: [LAMBDAS, n + 1] for weights
    (a on the CPU, 1 - a on GPU) of a = i / (LAMBDAS - 1), and the same with the link in place of
    the GPU (a resident adds nothing to the link)."""
    n = w.size
    gpu, link = np.zeros((LAMBDAS, n + 1)), np.zeros((LAMBDAS, n + 1))
    for j in range(LAMBDAS):
        a = j / (LAMBDAS - 1)
        for i in range(n - 1, -1, -1):
            gpu[j, i] = gpu[j, i + 1] + min(a * c[w[i]], (1 - a) * g[w[i]])
            link[j, i] = link[j, i + 1] + (min(a * c[w[i]], (1 - a) * t) if is_miss[i] else 0.0)
    return gpu, link


@njit(cache=True)
def _bound(i, k, work, finish, gpu, link, t, link_busy):
    """No completion of a state can finish before this. The slowed CPU only makes it later."""
    best = max(work, finish)
    for j in range(LAMBDAS):
        a = j / (LAMBDAS - 1)
        best = max(best, a * work + (1 - a) * finish + gpu[j, i])
        best = max(best, a * work + (1 - a) * (link_busy + k * t) + link[j, i])
    return best


@njit(cache=True)
def _prune(k, work, finish, bits, n, unit):
    """Keeps, of n states, those not beaten: sorted by copies, then work; finish must fall. unit > 0
    merges states of nearly equal work. Returns the new number of states."""
    # one sort key: copies first, then work (works are far below 1e12 us)
    order = np.argsort(k[:n] * 1e12 + work[:n], kind="mergesort")
    k2, w2, f2, b2 = k[order].copy(), work[order].copy(), finish[order].copy(), bits[order].copy()
    kept = 0
    for s in range(n):
        if kept and k[kept - 1] == k2[s]:
            if f2[s] >= finish[kept - 1] - 1e-12:
                continue
            if unit > 0 and int(w2[s] / unit) == int(work[kept - 1] / unit):
                kept -= 1  # same bin: the later one has the lower finish
        k[kept], work[kept], finish[kept], bits[kept] = k2[s], w2[s], f2[s], b2[s]
        kept += 1
    return kept


@njit(cache=True)
def _search(miss, res, c, g, t, link_busy, r, h_cpu, best):
    """(makespan, bit mask of GPU experts: residents, then misses) of the best assignment that is
    below `best`, else (inf, ..)."""
    n = miss.size + res.size
    w = np.concatenate((res, miss))
    is_miss = np.arange(n) >= res.size
    gpu, link = _bounds(w, is_miss, c, g, t)
    k, work, finish = np.zeros(2), np.zeros(2), np.zeros(2)
    bits = np.zeros((2, WORDS), np.uint64)
    states = 1
    for i in range(n):
        k2, work2, finish2 = np.empty(2 * states), np.empty(2 * states), np.empty(2 * states)
        bits2 = np.empty((2 * states, WORDS), np.uint64)
        m = 0
        for s in range(states):
            for to_gpu in range(2):
                kk, ww, ff = k[s], work[s], finish[s]
                if not to_gpu:
                    ww += c[w[i]]
                elif is_miss[i]:
                    kk += 1
                    ff = max(ff, link_busy + kk * t) + g[w[i]]
                else:
                    ff += g[w[i]]
                if _bound(i + 1, kk, ww, ff, gpu, link, t, link_busy) >= best * (1 - 1e-12):
                    continue
                k2[m], work2[m], finish2[m], bits2[m] = kk, ww, ff, bits[s]
                if to_gpu:
                    bits2[m, i // 64] |= np.uint64(1) << np.uint64(i % 64)
                m += 1
        if m == 0:
            return np.inf, np.zeros(WORDS, np.uint64)
        states = _prune(k2, work2, finish2, bits2, m, 1e-5 * best if m > MOST else 0.0)
        k, work, finish, bits = k2, work2, finish2, bits2
    found, mask = np.inf, np.zeros(WORDS, np.uint64)
    for s in range(states):
        span = max(rules.cpu_finish(work[s], link_busy + k[s] * t, r, h_cpu), finish[s])
        if span < found:
            found, mask = span, bits[s].copy()
    return found, mask
