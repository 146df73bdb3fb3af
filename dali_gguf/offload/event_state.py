"""What the event simulation fixes and what it changes, as compiled code takes them."""

from typing import NamedTuple

import numpy as np
from numba import njit

QUEUE = 64
TOTALS = (
    "time",
    "uses",
    "hits",
    "tokens",
    "token_hits",
    "prefetched",
    "useful",
    "late",
    "fills",
    "adopted",
    "copies",
    "cpu",
    "gpu",
    "link",
    "cpu_experts",
    "both",
    "both_span",
    "both_cpu",
    "both_gpu",
    "imbalance",
    "moe",
    "cpu_critical",
    "warm_time",
)
(
    TIME,
    USES,
    HITS,
    TOKENS,
    TOKEN_HITS,
    PREFETCHED,
    USEFUL,
    LATE,
    FILLS,
    ADOPTED,
    COPIES,
    CPU,
    GPU,
    LINK,
    CPU_EXPERTS,
    BOTH,
    BOTH_SPAN,
    BOTH_CPU,
    BOTH_GPU,
    IMBALANCE,
    MOE,
    CPU_CRITICAL,
    WARM_TIME,
) = range(len(TOTALS))
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
        resident.astype(np.uint8).copy(),
        score.astype(np.float64).copy(),
        np.full((n_layer, n_expert), -1, np.int64),
        np.ones(n_layer),
        np.zeros(n_layer, np.int64),
        np.zeros(n_expert, np.uint8),
        np.zeros((n_layer, n_expert), np.uint8),
        np.zeros((QUEUE, 3), np.int64),
        np.zeros((QUEUE, 3), np.int64),
        np.zeros(8),
        np.zeros(len(TOTALS)),
        np.zeros((512, 4)),
    )


@njit(cache=True, nogil=True)
def note(log, at, wanted, kind, layer, start, end):
    """Notes an event if wanted. (Helpers take arrays: run and state compile slowly.)"""
    n = int(at[N_LOG])
    if wanted and n < log.shape[0] and end > start:
        log[n, 0], log[n, 1], log[n, 2], log[n, 3] = kind, layer, start, end
        at[N_LOG] += 1


@njit(cache=True, nogil=True)
def drop(queue, row, at, length):
    """Removes a row of a queue whose length is at[length]. (Slices compile slowly.)"""
    at[length] -= 1
    for i in range(row, int(at[length])):
        for j in range(3):
            queue[i, j] = queue[i + 1, j]


@njit(cache=True, nogil=True)
def account_layer(totals, cpu, gpu, n_cpu, n_other):
    """Busy times, and balance where both sides had experts."""
    span = max(cpu, gpu)
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
