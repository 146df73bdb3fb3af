"""How fast this machine reads memory: the bound of decode."""

import time

import numpy as np

from dali_gguf.kernels.lanes import zero_i32x8
from dali_gguf.kernels.pool import Pool, work_function
from dali_gguf.kernels.records import word
from dali_gguf.kernels.simd import load_i32x8, prefetch, store, v_add
from dali_gguf.kernels.sums import sum_i32

ADDRESS, BYTES, SUMS = range(3)
AHEAD = 2048  # hardware prefetch stops at each page


def read_work(job, thread, threads):
    """Sums this thread's share of the bytes."""
    share = word(job, BYTES) // threads // 256 * 256
    start = word(job, ADDRESS) + thread * share
    a, b, c, d = zero_i32x8(), zero_i32x8(), zero_i32x8(), zero_i32x8()
    for at in range(start, start + share, 128):
        prefetch(at + AHEAD)
        prefetch(at + AHEAD + 64)
        a = v_add(a, load_i32x8(at))
        b = v_add(b, load_i32x8(at + 32))
        c = v_add(c, load_i32x8(at + 64))
        d = v_add(d, load_i32x8(at + 96))
    store(word(job, SUMS) + 64 * thread, sum_i32(v_add(v_add(a, b), v_add(c, d))))


def read_bandwidth(pool: Pool, size: int = 1 << 30, repeats: int = 3) -> float:
    """GB/s of the pool's threads reading `size` bytes of memory once; the best of the repeats."""
    memory, sums = np.ones(size // 8, np.int64), np.zeros(8 * pool.threads, np.int64)
    job = np.array([memory.ctypes.data, memory.nbytes, sums.ctypes.data], np.int64)
    work, best = work_function(read_work), 0.0
    for _ in range(repeats + 1):  # the first also compiles and warms up
        started = time.perf_counter()
        pool.run(work, job.ctypes.data)
        best = max(best, memory.nbytes / (time.perf_counter() - started) / 1e9)
    return best
