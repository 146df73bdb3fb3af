"""Sorts a step's (token, slot) pairs by expert, for the experts that one device computes.

The result is one int64 table that a GPU gets in one transfer. With n experts, P of their pairs, T
tokens and A slots a token, its parts follow each other:
    at [n]          byte offset of the expert's matrices in the device's slots
    expert [n]      its id (for biases)
    first [n + 1]   its pairs are first[j] .. first[j + 1]
    source [P]      token of each pair
    place [T * A]   pair of each (token, slot), -1 if the expert is not among the n
    weights [T * A] router weights, as float32 two to a number
"""

from typing import NamedTuple

import numpy as np
from numba import njit


@njit(cache=True)
def fill_table(expert_ids, weights, experts, offsets, job_of, table):
    """Writes the table of experts int64 [n], whose offsets are in int64 [E], by expert. Returns
    (P, most pairs of one expert). ValueError for an expert that is nowhere (offset -1)."""
    n, n_token, n_used = experts.size, expert_ids.shape[0], expert_ids.shape[1]
    job_of[:] = -1
    first = table[2 * n : 3 * n + 1]
    first[:] = 0
    for j in range(n):
        e = experts[j]
        if offsets[e] < 0:
            raise ValueError("an expert is in no slot")
        job_of[e], table[j], table[n + j] = j, offsets[e], e
    for t in range(n_token):
        for a in range(n_used):
            j = job_of[expert_ids[t, a]]
            if j >= 0:
                first[j + 1] += 1
    most = 0
    for j in range(n):
        most = max(most, first[j + 1])
        first[j + 1] += first[j]
    total = first[n]
    source = table[3 * n + 1 : 3 * n + 1 + total]
    place = table[3 * n + 1 + total : 3 * n + 1 + total + n_token * n_used]
    cursor = first[:n].copy()
    for t in range(n_token):
        for a in range(n_used):
            j = job_of[expert_ids[t, a]]
            place[t * n_used + a] = cursor[j] if j >= 0 else -1
            if j >= 0:
                source[cursor[j]] = t
                cursor[j] += 1
    tail = table[3 * n + 1 + total + n_token * n_used :].view(np.float32)
    for t in range(n_token):
        for a in range(n_used):
            tail[t * n_used + a] = weights[t, a]
    return total, most


def room(n_jobs: int, n_pairs: int) -> int:
    """Most numbers a table takes with so many experts and (token, slot) pairs in the step."""
    return 3 * n_jobs + 1 + 2 * n_pairs + (n_pairs + 1) // 2


class Pairs(NamedTuple):  # a dataclass would take a microsecond more to make
    """table int64 in host memory (a buffer that begins with the table, and is written again by a
    later build), and where its parts begin."""

    table: np.ndarray
    n_jobs: int
    n_pairs: int
    most: int
    n_token: int
    n_used: int

    @property
    def at_expert(self) -> int:
        return self.n_jobs

    @property
    def at_first(self) -> int:
        return 2 * self.n_jobs

    @property
    def at_source(self) -> int:
        return 3 * self.n_jobs + 1

    @property
    def at_place(self) -> int:
        return self.at_source + self.n_pairs

    @property
    def at_weights(self) -> int:
        return self.at_place + self.n_token * self.n_used

    @property
    def size(self) -> int:
        """Numbers in the table."""
        return self.at_weights + (self.n_token * self.n_used + 1) // 2
