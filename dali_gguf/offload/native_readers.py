"""Reader threads in compiled code, without Python and its lock: the functions they run.

The same rules as read_queue.py (what is waited for goes before guesses, few guesses at a time),
over job records in shared memory. Job key * 3 + i reads range i of an expert. One lock guards
everything but the reads; threads without work sleep in the kernel. Keys from SPLIT on are those of
a second channel, whose ends are reported to another thread.

Measured on two cores with the model running: Python threads cost 20 ms a token in handing the lock
of the interpreter to and fro, these 2.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dali_gguf.kernels.pool import atomic_store, yield_core
from dali_gguf.kernels.records import word
from dali_gguf.kernels.simd import I64, jit, store

RANGES = 3  # of an expert, at most
IDLE, QUEUED, TAKEN = range(3)  # states of a job
EINTR = 4
CLOCK_MONOTONIC = 1

# words of the control record: first those that change, then addresses and constants
# (names in pairs: of the first channel, of the second)
(LOCK, RUNNING, GUESSING, SLEEPING, WAITING, WAITING_2, STOP, BYTES, BUSY_NS, SINCE, DEMAND_HEAD,
 DEMAND_TAIL, GUESS_HEAD, GUESS_TAIL, ENDED_HEAD, ENDED_HEAD_2, ENDED_TAIL,
 ENDED_TAIL_2) = range(18)
(TABLE, COUNT, STATE, LEFT, BAD, PLACE, DEMAND, GUESS, ENDED, ENDED_2, MASK, WAKE, DONE, DONE_2,
 SPLIT, MOST_GUESSES) = range(18, 34)
CHANNELS = 2
WORDS = 40
FD, START, WANT, NEED, AT = range(5)  # words of a job in TABLE
JOB_WORDS = 8

_pread = types.ExternalFunction(
    "pread", types.int64(types.int32, types.intp, types.int64, types.int64)
)
_read = types.ExternalFunction("read", types.int64(types.int32, types.intp, types.int64))
_write = types.ExternalFunction("write", types.int64(types.int32, types.intp, types.int64))
_errno = types.ExternalFunction("__errno_location", types.intp())
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))


@intrinsic
def swap(typing, address, value):
    """Writes value atomically and returns what was there."""

    def gen(context, b, sig, args):
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.intp(types.intp, types.intp), gen


@intrinsic
def load_i32_at(typing, address):
    def gen(context, b, sig, args):
        value = b.load(b.inttoptr(args[0], ir.IntType(32).as_pointer()))
        return b.sext(value, I64)

    return types.intp(types.intp), gen


@jit
def put(ctl, index, value):
    store(ctl + 8 * index, np.intp(value))


@jit
def add(ctl, index, value):
    put(ctl, index, word(ctl, index) + value)


@jit
def lock(ctl):
    while swap(ctl + 8 * LOCK, 1) != 0:
        yield_core()


@jit
def unlock(ctl):
    atomic_store(ctl + 8 * LOCK, 0)


@jit
def now(scratch):
    """Nanoseconds."""
    _clock(np.int32(CLOCK_MONOTONIC), scratch)
    return word(scratch, 0) * 1_000_000_000 + word(scratch, 1)


@jit
def push(ctl, ring, head, tail, item):
    end = word(ctl, tail)
    store(word(ctl, ring) + 8 * (end & word(ctl, MASK)), np.intp(item))
    put(ctl, tail, end + 1)


@jit
def pop_queued(ctl, ring, head, tail):
    """The first job of a ring that is still queued, taken; entries of others are dropped. -1:
    none."""
    states = word(ctl, STATE)
    while word(ctl, head) < word(ctl, tail):
        job = word(word(ctl, ring), word(ctl, head) & word(ctl, MASK))
        add(ctl, head, 1)
        if word(states, job) == QUEUED:
            put(states, job, TAKEN)
            return job
    return -1


@jit
def wake(ctl, jobs):
    """How many sleepers to wake for that many new jobs; call with the lock, then write to WAKE."""
    count = min(jobs, word(ctl, SLEEPING))
    add(ctl, SLEEPING, -count)
    return count


@jit
def ring_bell(ctl, fd, count, scratch):
    if count > 0:
        store(scratch, np.intp(count))
        _write(np.int32(word(ctl, fd)), scratch, 8)


@jit
def fetch(ctl, job):
    """Reads a job's range; bytes read, less than its NEED after an error or at the end of the
    file."""
    at = word(ctl, TABLE) + 8 * JOB_WORDS * job
    to = word(word(ctl, PLACE), job // RANGES) + word(at, AT)
    got = 0
    while got < word(at, NEED):
        left, offset = word(at, WANT) - got, word(at, START) + got
        count = _pread(np.int32(word(at, FD)), to + got, left, offset)
        if count > 0:
            got += count
        elif count == 0 or load_i32_at(_errno()) != EINTR:
            break
    return got


@jit
def finish(ctl, job, got, is_guess, scratch):
    """Counts a read that has ended; tells the waiting thread when its expert is whole."""
    key = job // RANGES
    lock(ctl)
    add(ctl, RUNNING, -1)
    add(ctl, GUESSING, -is_guess)
    add(ctl, BYTES, got)
    if word(ctl, RUNNING) == 0:
        add(ctl, BUSY_NS, now(scratch) - word(ctl, SINCE))
    put(word(ctl, STATE), job, IDLE)
    if got < word(word(ctl, TABLE) + 8 * JOB_WORDS * job, NEED):
        put(word(ctl, BAD), key, 1)
    add(word(ctl, LEFT), key, -1)
    bell, channel = 0, 1 if key >= word(ctl, SPLIT) else 0
    if word(word(ctl, LEFT), key) == 0:
        push(ctl, ENDED + channel, ENDED_HEAD + channel, ENDED_TAIL + channel, key)
        bell = word(ctl, WAITING + channel)
        put(ctl, WAITING + channel, 0)
    unlock(ctl)
    ring_bell(ctl, DONE + channel, bell, scratch)


@jit
def serve(ctl, scratch):
    """The life of a reader thread. scratch: 16 bytes of its own."""
    while True:
        lock(ctl)
        if word(ctl, STOP):
            unlock(ctl)
            return
        job, is_guess = pop_queued(ctl, DEMAND, DEMAND_HEAD, DEMAND_TAIL), 0
        if job < 0 and word(ctl, GUESSING) < word(ctl, MOST_GUESSES):
            job, is_guess = pop_queued(ctl, GUESS, GUESS_HEAD, GUESS_TAIL), 1
        if job < 0:
            add(ctl, SLEEPING, 1)
            unlock(ctl)
            _read(np.int32(word(ctl, WAKE)), scratch, 8)
            continue
        if word(ctl, RUNNING) == 0:
            put(ctl, SINCE, now(scratch))
        add(ctl, RUNNING, 1)
        add(ctl, GUESSING, is_guess)
        unlock(ctl)
        finish(ctl, job, fetch(ctl, job), is_guess, scratch)


# ---- what the Python thread of a channel calls; scratch: 16 bytes of its own


@jit
def queue_one(ctl, key, place, wanted):
    """Queues the ranges of an expert that goes to the address place; returns how many."""
    count = word(word(ctl, COUNT), key)
    put(word(ctl, PLACE), key, place)
    put(word(ctl, LEFT), key, count)
    put(word(ctl, BAD), key, 0)
    for job in range(RANGES * key, RANGES * key + count):
        put(word(ctl, STATE), job, QUEUED)
        if wanted:
            push(ctl, DEMAND, DEMAND_HEAD, DEMAND_TAIL, job)
        else:
            push(ctl, GUESS, GUESS_HEAD, GUESS_TAIL, job)
    return count


@jit
def start(ctl, keys, places, wanted, scratch):
    """Queues experts keys int64 [n] to the addresses places [n], and wakes readers once: woken
    threads take the core from the caller."""
    lock(ctl)
    jobs = 0
    for i in range(len(keys)):
        jobs += queue_one(ctl, keys[i], places[i], wanted)
    sleepers = wake(ctl, jobs)
    unlock(ctl)
    ring_bell(ctl, WAKE, sleepers, scratch)


@jit
def promote(ctl, key, scratch):
    """The ranges nobody has begun pass all guesses."""
    lock(ctl)
    moved = 0
    for job in range(RANGES * key, RANGES * key + word(word(ctl, COUNT), key)):
        if word(word(ctl, STATE), job) == QUEUED:
            push(ctl, DEMAND, DEMAND_HEAD, DEMAND_TAIL, job)
            moved += 1
    sleepers = wake(ctl, moved)
    unlock(ctl)
    ring_bell(ctl, WAKE, sleepers, scratch)


@jit
def cancel(ctl, key):
    """Takes an expert's ranges back; False, and nothing done, if one has been begun."""
    first, count = RANGES * key, word(word(ctl, COUNT), key)
    lock(ctl)
    free = True
    for job in range(first, first + count):
        free = free and word(word(ctl, STATE), job) == QUEUED
    if free:
        for job in range(first, first + count):
            put(word(ctl, STATE), job, IDLE)
    unlock(ctl)
    return free


@jit
def take_ended(ctl, channel, keys):
    """Fills keys int64 [n] with experts that have ended; returns how many."""
    lock(ctl)
    head, ring = word(ctl, ENDED_HEAD + channel), word(ctl, ENDED + channel)
    count = min(len(keys), word(ctl, ENDED_TAIL + channel) - head)
    for i in range(count):
        keys[i] = word(ring, (head + i) & word(ctl, MASK))
    add(ctl, ENDED_HEAD + channel, count)
    unlock(ctl)
    return count


@jit
def wait_ended(ctl, channel, scratch):
    """Sleeps until an expert has ended, or a signal came."""
    lock(ctl)
    empty = word(ctl, ENDED_TAIL + channel) == word(ctl, ENDED_HEAD + channel)
    if empty:
        put(ctl, WAITING + channel, 1)
    unlock(ctl)
    if empty:
        _read(np.int32(word(ctl, DONE + channel)), scratch, 8)


@jit
def stop(ctl, threads, scratch):
    lock(ctl)
    put(ctl, STOP, 1)
    unlock(ctl)
    ring_bell(ctl, WAKE, threads, scratch)
