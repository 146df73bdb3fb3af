"""The placement rules as compiled functions; offload/placement.py is their front.

Costs of an expert with w tokens: c[w] on the CPU, g[w] on the GPU, t to copy (offload/cost.py). The
GPU runs resident experts first while the link copies the missing ones in order (a two-stage flow
shop); while the link copies, the CPU runs at r of its speed. All policies minimise, or try to,
max(finish of the CPU, finish of the GPU).
"""

import numpy as np
from numba import njit

NO_DISK = (0.0, 0.0, 0.0, -np.inf, 0.0, 0.0)
THRESHOLD, GREEDY, OPTIMAL, BALANCE, STATIC_LAYERS, STATIC_HOT, ALL_CPU, ALL_GPU = range(8)


@njit(cache=True, nogil=True)
def cpu_finish(work, link, r, h_cpu):
    """Time at which the CPU has done `work` us of experts, when the link is busy until `link`."""
    if work <= 0:
        return 0.0
    if r >= 1:
        return h_cpu + work
    return h_cpu + (work / r if work <= link * r else link + work - link * r)


@njit(cache=True, nogil=True)
def gpu_finish(resident, w, n, g, t, link_busy):
    """Finish of the GPU: `resident` us of work at hand, then n copies with workloads w in order."""
    finish, link = resident, link_busy
    for i in range(n):
        link += t
        finish = max(finish, link) + g[w[i]]
    return finish


@njit(cache=True, nogil=True)
def threshold(miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin):
    """threshold_after without experts on disk."""
    return threshold_after(
        miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin, NO_DISK
    )


@njit(cache=True, nogil=True)
def threshold_after(miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin, disk):
    """Best (copies, residents to the CPU) when the copies are the largest misses and the residents
    sent away are the smallest. miss, res: workloads, descending. Returns (k, q, makespan).

    Copies in descending order are Johnson's order (equal copy times). The GPU's finish of k copies
    is max(residents + computed[k], late[k]), where late does not depend on the residents; the CPU
    cannot finish before its work. So for every q the scan over k starts where the work first fits
    the best makespan so far and ends where the GPU exceeds it: a few steps in all.
    disk: what experts on disk add (placement_disk.terms).
    Residents move only for a predicted gain above `margin`."""
    work, computed, late = np.empty(n_miss + 1), np.empty(n_miss + 1), np.empty(n_miss + 1)
    work[n_miss] = computed[0] = late[0] = 0.0
    for i in range(n_miss - 1, -1, -1):
        work[i] = work[i + 1] + c[miss[i]]
    for k in range(1, n_miss + 1):
        x = g[miss[k - 1]]
        computed[k] = computed[k - 1] + x
        late[k] = max(late[k - 1], link_busy + k * t) + x
    here = 0.0
    for i in range(n_res):
        here += g[res[i]]
    disk_work, disk_tail, disk_gpu, disk_late, disk_end, disk_link = disk
    best, best_k, best_q = np.inf, 0, 0
    stay, stay_k = np.inf, 0  # best without moving residents
    moved, first = 0.0, 0
    for q in range(n_res + 1):
        if q:
            moved += c[res[n_res - q]]
            here -= g[res[n_res - q]]
        if moved >= best:
            break
        while first <= n_miss and work[first] + moved >= best:
            first += 1
        for k in range(first, n_miss + 1):
            gpu = max(here + computed[k], late[k]) + disk_gpu
            gpu = max(gpu, link_busy + k * t + disk_late, disk_end)
            if gpu >= best:
                break
            link = link_busy + k * t + disk_link
            cpu = max(cpu_finish(work[k] + moved + disk_work, link, r, h_cpu), disk_tail)
            span = max(cpu, gpu)
            if span < best * (1 - 1e-12):
                best, best_k, best_q = span, k, q
        if q == 0:
            stay, stay_k = best, best_k
    if best_q and best > (1 - margin) * stay:
        return stay_k, 0, stay
    return best_k, best_q, best


@njit(cache=True, nogil=True)
def greedy(miss, n_miss, res, n_res, c, g, t, to_gpu):
    """The paper's rule: experts by the gap between their CPU and GPU time, largest first; each goes
    to the side that then finishes earlier, times simply summed. to_gpu int64 [n_miss + n_res]."""
    n = n_miss + n_res
    gap, order = np.empty(n), np.empty(n, np.int64)
    for i in range(n):  # an insertion sort: compiling np.argsort takes seconds
        w = miss[i] if i < n_miss else res[i - n_miss]
        x, j = abs(c[w] - g[w] - (t if i < n_miss else 0.0)), i - 1
        while j >= 0 and gap[j] < x:
            gap[j + 1], order[j + 1] = gap[j], order[j]
            j -= 1
        gap[j + 1], order[j + 1] = x, i
    cpu = gpu = 0.0
    for i in order:
        w = miss[i] if i < n_miss else res[i - n_miss]
        on_cpu = cpu + c[w]
        on_gpu = gpu + g[w] + (t if i < n_miss else 0.0)
        to_gpu[i] = on_gpu <= on_cpu
        if to_gpu[i]:
            gpu = on_gpu
        else:
            cpu = on_cpu


@njit(cache=True, nogil=True)
def makespan(miss, n_miss, res, n_res, to_gpu, c, g, t, link_busy, r, h_cpu):
    """(CPU finish, GPU finish) of any assignment to_gpu int64 [n_miss + n_res]; copies run in the
    order of miss."""
    work = gpu = 0.0
    for i in range(n_res):
        if to_gpu[n_miss + i]:
            gpu += g[res[i]]
        else:
            work += c[res[i]]
    link = link_busy
    for i in range(n_miss):
        if to_gpu[i]:
            link += t
            gpu = max(gpu, link) + g[miss[i]]
        else:
            work += c[miss[i]]
    return cpu_finish(work, link, r, h_cpu), gpu


@njit(cache=True, nogil=True)
def assign(code, miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin, to_gpu):
    """Fills to_gpu int64 [n_miss + n_res] for sorted (descending) workloads, misses first; returns
    the makespan. `optimal` is not here (offload/optimal.py): it is for tests and simulation."""
    copies, stay, span = 0, n_res, 0.0
    if code == THRESHOLD:
        copies, away, span = threshold(
            miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin
        )
        stay = n_res - away
    elif code == ALL_GPU:
        copies = n_miss
    elif code == ALL_CPU:
        stay = 0
    elif code == BALANCE and n_miss:  # by bandwidth: link / (link + CPU), from the costs of w = 1
        copies = int(n_miss * c[1] / (c[1] + t) + 0.5)
    for i in range(n_miss):
        to_gpu[i] = i < copies
    for i in range(n_res):
        to_gpu[n_miss + i] = i < stay
    if code == THRESHOLD:
        return span
    if code == GREEDY:
        greedy(miss, n_miss, res, n_res, c, g, t, to_gpu)
    cpu, gpu = makespan(miss, n_miss, res, n_res, to_gpu, c, g, t, link_busy, r, h_cpu)
    return max(cpu, gpu)


@njit(cache=True, nogil=True)
def sort_descending(w, ids, n):
    """Sorts w[:n] descending and ids[:n] with it; stable. By counting while the range is small."""
    top = 0
    for i in range(n):
        top = max(top, w[i])
    if top <= 1:
        return
    if n < 24 or top > 2048:
        for i in range(1, n):
            x, e, j = w[i], ids[i], i - 1
            while j >= 0 and w[j] < x:
                w[j + 1], ids[j + 1] = w[j], ids[j]
                j -= 1
            w[j + 1], ids[j + 1] = x, e
        return
    start = np.zeros(top + 2, np.int64)
    for i in range(n):
        start[top - w[i] + 1] += 1
    for i in range(1, top + 1):
        start[i] += start[i - 1]
    old_w, old_ids = np.empty(n, np.int64), np.empty(n, np.int64)
    for i in range(n):
        old_w[i], old_ids[i] = w[i], ids[i]
    for i in range(n):
        x = old_w[i]
        j = start[top - x]
        start[top - x] = j + 1
        w[j], ids[j] = x, old_ids[i]


@njit(cache=True, nogil=True)
def split_workload(workload, resident, top, ids, w):
    """Active experts into misses (row 0) and residents (row 1) of ids, w int64 [2, E], sorted by
    workload descending; workloads above `top` count as top. Returns (n_miss, n_res)."""
    n_miss = n_res = 0
    for e in range(workload.size):  # written always, counted if active: no branch to mispredict
        x, here = min(workload[e], top), resident[e] != 0
        ids[0, n_miss] = ids[1, n_res] = e
        w[0, n_miss] = w[1, n_res] = x
        n_miss += (x > 0) & (not here)
        n_res += (x > 0) & here
    sort_descending(w[0], ids[0], n_miss)
    sort_descending(w[1], ids[1], n_res)
    return n_miss, n_res


@njit(cache=True)
def plan_layer(
    code, copies, workload, resident, c, g, t, link_busy, r, h_cpu, margin, scratch
):
    """One layer's plan in rows of scratch int64 [9, E]: 0 experts for the CPU, 1 residents for the
    GPU, 2 copies in the order of copying. Returns (n_cpu, n_gpu, n_copy, makespan). copies False:
    misses go to the CPU and residents stay. Called from Python it keeps the interpreter lock:
    getting that back takes longer than the plan."""
    ids, w, to_gpu = scratch[3:5], scratch[5:7], scratch[7:9].reshape(-1)
    n_miss, n_res = split_workload(workload, resident, c.size - 1, ids, w)
    if n_miss and not copies:
        code = STATIC_HOT
    span = assign(code, w[0], n_miss, w[1], n_res, c, g, t, link_busy, r, h_cpu, margin, to_gpu)
    n_cpu, n_gpu, n_copy = deal(ids, n_miss, n_res, to_gpu, scratch)
    return n_cpu, n_gpu, n_copy, span


@njit(cache=True, nogil=True)
def deal(ids, n_miss, n_res, to_gpu, scratch):
    """Experts ids int64 [2, E] of an assignment into the rows of scratch that plan_layer names.
    Returns (n_cpu, n_gpu, n_copy)."""
    n_cpu, n_gpu, n_copy = 0, 0, 0
    for i in range(n_miss):
        if to_gpu[i]:
            scratch[2, n_copy] = ids[0, i]
            n_copy += 1
        else:
            scratch[0, n_cpu] = ids[0, i]
            n_cpu += 1
    for i in range(n_res):
        if to_gpu[n_miss + i]:
            scratch[1, n_gpu] = ids[1, i]
            n_gpu += 1
        else:
            scratch[0, n_cpu] = ids[1, i]
            n_cpu += 1
    return n_cpu, n_gpu, n_copy
