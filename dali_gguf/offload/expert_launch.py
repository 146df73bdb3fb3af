"""A layer's experts launched from compiled code: gate and up, down, and the weighted sum.

For a step of one token, which is most of decoding, the table of its experts is built and sent there
as well: one call from Python in all.
"""

import numpy as np
from numba import njit
from torch import Tensor

from dali_gguf.offload.cuda_launch import (
    GRID_X,
    GRID_Y,
    Launch,
    check,
    copy_to_device,
    entry_of,
    record_event,
    run_with,
)
from dali_gguf.offload.expert_pairs import fill_table
from dali_gguf.offload.pair_table import PairTable
from dali_gguf.routing import Routing

CHANGING = ("x", "base", "jobs", "at_expert", "at_first", "at_source", "out")
CHANGING_SUM = ("pairs", "jobs", "weights", "at_place", "at_weights", "out")


@njit(cache=True)
def launch_grouped(entry, launch, stream, x, base, table, n_jobs, out):
    """A Launch of vector_kernel, for n_jobs matrices. Returns CUresult."""
    launch[GRID_Y] = n_jobs
    values = x, base, table, n_jobs, 2 * n_jobs, 3 * n_jobs + 1, out
    return run_with(entry, launch, stream, values)


@njit(cache=True)
def launch_products(entry, launches, stream, x, bases, table, outs):
    """Launches of vector_kernel for a matrix each: tuples of Launches' numbers, of where the
    matrices lie and of where the results go."""
    code = np.int32(0)
    for i in range(len(launches)):
        one = launch_grouped(entry, launches[i], stream, x, bases[i], table, 1, outs[i])
        code = code or one
    return code


@njit(cache=True)
def launch_experts(entry, up, down, total, stream, x, base, table, out, h, y, n_jobs, at_place,
                   at_weights, n_token):
    """Three Launches: vector_kernel twice, combine_kernel. h, y: what is in between."""
    code = launch_grouped(entry, up, stream, x, base, table, n_jobs, h)
    code = code or launch_grouped(entry, down, stream, h, base, table, n_jobs, y)
    total[GRID_X] = n_token
    values = y, table, table, at_place, 2 * at_weights, out
    return code or run_with(entry, total, stream, values)


@njit(cache=True)
def launch_one_token(fixed, event, up, down, total, stream, x, base, table, out, expert_ids,
                     weights, experts, offsets, job_of, buffer):
    """Builds the table in buffer, sends it, records the event (0: none) and launches. fixed: of
    OneToken."""
    entry, copy, record, h, y = fixed[0], fixed[1], fixed[2], fixed[3], fixed[4]
    n_pairs, _ = fill_table(expert_ids, weights, experts, offsets, job_of, buffer)
    n_jobs, n_used = experts.size, expert_ids.shape[1]
    at_place = 3 * n_jobs + 1 + n_pairs
    code = np.int32(0)
    if copy:
        nbytes = 8 * (at_place + n_used + (n_used + 1) // 2)
        code = copy_to_device(copy, table, buffer.ctypes.data, nbytes, stream)
    if event:
        code = code or record_event(record, event, stream)
    return code or launch_experts(entry, up, down, total, stream, x, base, table, out, h, y, n_jobs,
                                  at_place, at_place + n_used, 1)  # fmt: skip


class OneToken:
    """What a layer's experts are launched with in a step of one token: fixed and launches (up,
    down, total) of launch_one_token."""

    def __init__(self, up: Launch, down: Launch, total: Launch, table: PairTable,
                 space: tuple[Tensor, Tensor]):
        """total: of combine_kernel. space: for what is in between, a row for each used expert."""
        self._cols, self._space, self.stream = space[1].shape[1], space, up.stream
        copy = entry_of("cuMemcpyHtoDAsync_v2") if table.apart else 0
        entries = up.entry, copy, entry_of("cuEventRecord")
        self.fixed = np.array([*entries, *(s.data_ptr() for s in space)], np.int64)
        self.launches = up.numbers, down.numbers, total.numbers

    def result(self, x: Tensor) -> Tensor:
        """Memory [1, D] for what comes out."""
        return x.new_empty(1, self._cols)

    def __call__(self, x: Tensor, base: Tensor, table: PairTable, routing: Routing,
                 experts: np.ndarray, offsets: np.ndarray) -> Tensor:
        """As torch_moe.compute, x [1, D] contiguous and aligned."""
        out = self.result(x)
        where = x.data_ptr(), base.data_ptr(), table.address, out.data_ptr()
        step = routing.expert_ids, routing.weights, experts, offsets
        memory = table.job_of, table.next_buffer()
        launches, stream = self.launches, self.stream()
        check(launch_one_token(self.fixed, 0, *launches, stream, *where, *step, *memory))
        return out
