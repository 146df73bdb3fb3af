"""The placement rules when experts lie in three places: GPU slots, RAM, disk.

An expert on disk is read once, whoever computes it, and all reads share the disk: the i-th ends at
i * t_disk. Reads of copied experts go first, since they have the longer way. The CPU computes what
is in RAM, then what arrives; the link copies what is in RAM, then what arrives: two-stage flow
shops whose finish is the largest, over the experts, of one's arrival plus all work from it on.
Arguments as in placement_rules; misses stand in the order RAM, disk, each largest workload first.
"""

import numpy as np
from numba import njit

from dali_gguf.offload import placement_rules as rules


@njit(cache=True, nogil=True)
def terms(disk, n_disk, to_gpu, c, g, t, t_disk):
    """What experts on disk, workloads disk[:n_disk], to_gpu [n_disk], add to the sides:
    (CPU work, CPU finish at least, GPU work, GPU finish after the link's other copies, GPU finish
    at least, link time)."""
    copied = 0
    for i in range(n_disk):
        copied += to_gpu[i] != 0
    work = tail = gpu = end = 0.0
    late = -np.inf
    i_copy, i_cpu = copied, n_disk  # reads that have ended when the expert's has
    for i in range(n_disk - 1, -1, -1):
        if to_gpu[i]:
            gpu += g[disk[i]]
            late = max(late, i_copy * t + gpu)
            end = max(end, i_copy * t_disk - (i_copy - 1) * t + late)
            i_copy -= 1
        else:
            work += c[disk[i]]
            tail = max(tail, i_cpu * t_disk + work)
            i_cpu -= 1
    return work, tail, gpu, late, end, copied * t


@njit(cache=True, nogil=True)
def threshold(
    miss, n_ram, n_disk, res, n_res, c, g, t, t_disk, link_busy, r, h_cpu, margin, to_gpu
):
    """placement_rules.threshold for every number of largest experts on disk that are copied; the
    best fills to_gpu. Returns its makespan."""
    disk, chosen = miss[n_ram:], np.zeros(n_disk, np.int64)
    best, best_k, best_d, best_q = np.inf, 0, 0, 0
    for d in range(n_disk + 1):
        if d:
            chosen[d - 1] = 1
        added = terms(disk, n_disk, chosen, c, g, t, t_disk)
        if max(added[1], added[4]) >= best:
            continue
        k, q, span = rules.threshold_after(
            miss, n_ram, res, n_res, c, g, t, link_busy, r, h_cpu, margin, added
        )
        if span < best * (1 - 1e-12):
            best, best_k, best_d, best_q = span, k, d, q
    for i in range(n_ram + n_disk):
        to_gpu[i] = i < best_k if i < n_ram else i - n_ram < best_d
    for i in range(n_res):
        to_gpu[n_ram + n_disk + i] = i < n_res - best_q
    return best


@njit(cache=True, nogil=True)
def makespan(miss, n_ram, n_disk, res, n_res, to_gpu, c, g, t, t_disk, link_busy, r, h_cpu):
    """Of any assignment to_gpu int64 [n_ram + n_disk + n_res]."""
    n_miss = n_ram + n_disk
    work, tail, disk_gpu, late, end, disk_link = terms(
        miss[n_ram:], n_disk, to_gpu[n_ram:], c, g, t, t_disk
    )
    gpu, link = 0.0, link_busy
    for i in range(n_res):
        if to_gpu[n_miss + i]:
            gpu += g[res[i]]
        else:
            work += c[res[i]]
    for i in range(n_ram):
        if to_gpu[i]:
            link += t
            gpu = max(gpu, link) + g[miss[i]]
        else:
            work += c[miss[i]]
    cpu = max(rules.cpu_finish(work, link + disk_link, r, h_cpu), tail)
    return max(cpu, gpu + disk_gpu, link + late, end)


@njit(cache=True, nogil=True)
def split_misses(in_ram, ids, w, n_miss):
    """Moves misses on disk behind those in RAM, in rows 0 of ids and w; returns how many are in
    RAM."""
    old_ids, old_w = ids[0, :n_miss].copy(), w[0, :n_miss].copy()
    n = n_ram = 0
    for here in (True, False):
        for i in range(n_miss):
            if in_ram[old_ids[i]] == here:
                ids[0, n], w[0, n] = old_ids[i], old_w[i]
                n += 1
        n_ram = n if here else n_ram
    return n_ram


@njit(cache=True)
def plan_layer(
    code, copies, workload, resident, in_ram, c, g, t, t_disk, link_busy, r, h_cpu, margin, scratch
):
    """placement_rules.plan_layer; in_ram bool [E]: of the misses. Other rules than threshold place
    as if all misses were in RAM (their reads are the same on either side); the makespan is right
    for all."""
    ids, w, to_gpu = scratch[3:5], scratch[5:7], scratch[7:9].reshape(-1)
    n_miss, n_res = rules.split_workload(workload, resident, c.size - 1, ids, w)
    if n_miss and not copies:
        code = rules.STATIC_HOT
    n_ram = split_misses(in_ram, ids, w, n_miss)
    n_disk, miss, res = n_miss - n_ram, w[0], w[1]
    if code == rules.THRESHOLD:
        span = threshold(
            miss, n_ram, n_disk, res, n_res, c, g, t, t_disk, link_busy, r, h_cpu, margin, to_gpu
        )
    else:
        rules.assign(code, miss, n_miss, res, n_res, c, g, t, link_busy, r, h_cpu, margin, to_gpu)
        span = makespan(
            miss, n_ram, n_disk, res, n_res, to_gpu, c, g, t, t_disk, link_busy, r, h_cpu
        )
    n_cpu, n_gpu, n_copy = rules.deal(ids, n_miss, n_res, to_gpu, scratch)
    return n_cpu, n_gpu, n_copy, span
