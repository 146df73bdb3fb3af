"""Threads that sit inside one nogil kernel: a launch is a store and a short spin, no Python.

A work function is a C callback `work(job, thread, threads)`: it splits the job by itself, with
chunks taken by fetch_add and barriers where a phase needs the whole of the one before. Waiting
threads spin briefly, then yield the core: on a busy machine the spinner would take the very time
that the others need.
"""

import atexit
import os
import sys
import threading

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

from dali_gguf.device import check_threads
from dali_gguf.kernels import isa
from dali_gguf.kernels.simd import I64, OPTIONS, call, jit

# words of the shared state, each on a cache line of its own (8 words)
GENERATION, WORK, JOB, STOP, DONE, COUNT, PHASE, CHUNK, RESTING = (8 * i for i in range(9))
STATE_WORDS = 72 + 8 * 8
SPIN = 2000  # rounds before yielding: about 50 us with the pause instruction
IDLE = 20_000  # rounds before a worker without work naps: some milliseconds

WORK_SIGNATURE = types.void(types.intp, types.intp, types.intp)


@intrinsic
def atomic_load(typing, address):
    def gen(context, b, sig, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.intp(types.intp), gen


@intrinsic
def atomic_store(typing, address, value):
    def gen(context, b, sig, args):
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), gen


@intrinsic
def fetch_add(typing, address, value):
    """Adds atomically and returns the value before."""

    def gen(context, b, sig, args):
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.intp(types.intp, types.intp), gen


@intrinsic
def pause(typing):
    def gen(context, b, sig, args):
        if isa.X86:
            call(b, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), gen


@intrinsic
def call_work(typing, function, job, thread, threads):
    """Calls a work function by its address."""

    def gen(context, b, sig, args):
        fn_type = ir.FunctionType(ir.VoidType(), [I64] * 3)
        b.call(b.inttoptr(args[0], fn_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), gen


# resolved by the JIT from the running process: libc on Unix, kernel32 on Windows
_WINDOWS = sys.platform == "win32"
yield_core = types.ExternalFunction("SwitchToThread" if _WINDOWS else "sched_yield", types.int32())
_sleep = types.ExternalFunction("Sleep" if _WINDOWS else "usleep", types.int32(types.uint32))
NAP = 1 if _WINDOWS else 50  # ms on Windows, us elsewhere: an idle worker's nap


@jit
def nap():
    _sleep(types.uint32(NAP))


@jit
def barrier(state, threads):
    """All threads of a launch meet here."""
    if threads == 1:
        return
    phase = atomic_load(state + 8 * PHASE)
    if fetch_add(state + 8 * COUNT, 1) == threads - 1:
        atomic_store(state + 8 * COUNT, 0)
        atomic_store(state + 8 * PHASE, phase + 1)
        return
    spins = 0
    while atomic_load(state + 8 * PHASE) == phase:
        pause()
        spins += 1
        if spins > SPIN:
            yield_core()


@jit
def launch(state, work, job, threads):
    """Runs work(job, thread, threads) on every thread and returns when all are done."""
    if threads == 1:
        call_work(work, job, 0, 1)
        return
    atomic_store(state + 8 * WORK, work)
    atomic_store(state + 8 * JOB, job)
    atomic_store(state + 8 * GENERATION, atomic_load(state + 8 * GENERATION) + 1)
    call_work(work, job, 0, threads)
    barrier(state, threads)


@jit
def serve(state, thread, threads):
    """The life of a worker: wait for a launch, do this thread's share, meet at the barrier."""
    seen = 0
    while True:
        spins = 0
        while atomic_load(state + 8 * GENERATION) == seen:
            pause()
            spins += 1
            if spins > IDLE or atomic_load(state + 8 * RESTING):
                nap()
            elif spins > SPIN:
                yield_core()
        seen += 1
        if atomic_load(state + 8 * STOP):
            return
        call_work(atomic_load(state + 8 * WORK), atomic_load(state + 8 * JOB), thread, threads)
        barrier(state, threads)


def work_function(function):
    """Compiles work(job, thread, threads) to a C callback and returns its address.

    The callback lives as long as the process: it is kept here.
    """
    compiled = cfunc(WORK_SIGNATURE, **_CFUNC_OPTIONS)(function)
    _kept.append(compiled)
    return compiled.address


_CFUNC_OPTIONS = {k: v for k, v in OPTIONS.items() if k != "nogil"}
_kept: list = []


def available_cpus() -> list[int]:
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores this process may use (two threads of a core share its arithmetic units)."""
    cores = set()
    for cpu in available_cpus():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                cores.add(f.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


class Pool:
    """threads - 1 workers and the calling thread. Only one thread may launch at a time."""

    def __init__(self, threads: int | None = None):
        self.threads = threads or physical_cores()
        check_threads(self.threads)
        self._words = np.zeros(STATE_WORDS, np.int64)
        start = -(-self._words.ctypes.data // 64) * 64
        self.state = start  # 64-byte aligned
        self._state_words = self._words[(start - self._words.ctypes.data) // 8 :]
        self._workers = [
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"dali-{i}")
            for i in range(1, self.threads)
        ]
        for worker in self._workers:
            worker.start()
        atexit.register(self.close)

    def _serve(self, thread: int) -> None:
        if sys.platform == "linux":
            cpus = available_cpus()  # a visit to its own core: new spinning threads may share one
            os.sched_setaffinity(0, {cpus[thread % len(cpus)]})
            os.sched_setaffinity(0, cpus)
        serve(self.state, thread, self.threads)

    def rest(self, resting: bool) -> None:
        """While the caller waits for something slow, workers sleep at once instead of spinning."""
        self._state_words[RESTING] = resting

    def run(self, work: int, job: int) -> None:
        launch(self.state, work, job, self.threads)

    def close(self) -> None:
        """Ends the workers; the pool cannot be used after."""
        if not self._workers:
            return
        stop(self.state)
        for worker in self._workers:
            worker.join()
        self._workers = []
        atexit.unregister(self.close)


@jit
def stop(state):
    atomic_store(state + 8 * STOP, 1)
    atomic_store(state + 8 * GENERATION, atomic_load(state + 8 * GENERATION) + 1)
