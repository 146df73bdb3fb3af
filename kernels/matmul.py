"""x times one or several weight matrices in one launch: quantize x once, then rows in chunks.

A plan holds what does not change from call to call: a job record of int64 words,
    STATE X TOKENS COLUMNS KIND RECORDS RECORD_BYTES POINTERS SCRATCH N_CHUNKS N_WEIGHTS
then for each weight W_WORDS words:
    FUNCTION W STRIDE ROWS OUT FIRST_CHUNK CHUNK_ROWS
Threads take chunks by fetch_add; which thread takes which does not change the result.
"""

import numpy as np

from dali_gguf.kernels import rows
from dali_gguf.kernels.formats import Format, format_of, matmat_address, matvec_address
from dali_gguf.kernels.pool import CHUNK, Pool, barrier, fetch_add, launch, work_function
from dali_gguf.kernels.quantize import FLOAT, quantize_row, record_bytes
from dali_gguf.kernels.records import word
from dali_gguf.kernels.simd import address_of, jit, store
from dali_gguf.tensor import Tensor

(STATE, X, TOKENS, COLUMNS, KIND, RECORDS, RECORD_BYTES, POINTERS, SCRATCH, N_CHUNKS,
 N_WEIGHTS) = range(11)
FIRST_WEIGHT, W_WORDS = 16, 8
FUNCTION, W, STRIDE, ROWS, OUT, FIRST_CHUNK, CHUNK_ROWS = range(7)
# from how many tokens on 16 rows are unpacked first (the results are the same bits). Measured, one
# core with AVX2, 96 x 2048 in Q8_0, Q4_K, Q6_K and MXFP4: unpacking makes 2 tokens a fifth slower
# and 3 up to a quarter faster.
MATMAT_FROM = 3


class Matrix:
    """A weight [rows, cols] ready for products; its kernels compile on first use."""

    __slots__ = ("tensor", "format", "address", "stride", "rows", "cols")

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        self.format: Format = format_of(tensor.type, tensor.name)
        self.address, self.stride = tensor.address, tensor.row_bytes
        self.rows, self.cols = tensor.nbytes // tensor.row_bytes, tensor.cols

    def function(self, tokens: int) -> int:
        """Address of the product for that many tokens."""
        return (matvec_address if tokens < MATMAT_FROM else matmat_address)(self.format)


@jit
def prepare_records(job, thread, threads):
    """This thread's share of the tokens: quantized records and their addresses."""
    n, kind, size = word(job, COLUMNS), word(job, KIND), word(job, RECORD_BYTES)
    for t in range(thread, word(job, TOKENS), threads):
        row = word(job, X) + 4 * n * t
        record = row
        if kind != FLOAT:
            record = word(job, RECORDS) + size * t
            quantize_row(kind, row, n, record)
        store(word(job, POINTERS) + 8 * t, record)


def work(job, thread, threads):
    prepare_records(job, thread, threads)
    barrier(word(job, STATE), threads)
    scratch = word(job, SCRATCH) + thread * rows.SCRATCH
    tokens, n = word(job, TOKENS), word(job, COLUMNS)
    while True:
        chunk = fetch_add(word(job, STATE) + 8 * CHUNK, 1)
        if chunk >= word(job, N_CHUNKS):
            return
        at = job + 8 * (FIRST_WEIGHT + W_WORDS * (word(job, N_WEIGHTS) - 1))
        while chunk < word(at, FIRST_CHUNK):
            at -= 8 * W_WORDS
        r0 = (chunk - word(at, FIRST_CHUNK)) * word(at, CHUNK_ROWS)
        r1 = min(r0 + word(at, CHUNK_ROWS), word(at, ROWS))
        for t in range(0, tokens, rows.MAX_TOKENS):
            rows.call_rows(
                word(at, FUNCTION), word(at, W), word(at, STRIDE), r0, r1, n,
                word(job, POINTERS) + 8 * t, min(tokens - t, rows.MAX_TOKENS),
                word(at, OUT) + 4 * t * word(at, ROWS), 4 * word(at, ROWS), scratch,
            )


@jit
def start(function, job, x, out, records, pointers, scratch, state, threads):
    """Fills the words that change, and launches. x [T, N], out float32 [T * all rows]."""
    address = address_of(job)
    tokens = x.shape[0]
    job[STATE], job[X], job[TOKENS] = state, address_of(x), tokens
    job[RECORDS], job[POINTERS], job[SCRATCH] = records, pointers, scratch
    target = address_of(out)
    for i in range(job[N_WEIGHTS]):
        at = FIRST_WEIGHT + W_WORDS * i
        job[at + OUT] = target
        target += 4 * tokens * job[at + ROWS]
    store(state + 8 * CHUNK, 0)
    launch(state, function, address, threads)


class Plan:
    """One call's weights, all with x's columns and one kind of record."""

    def __init__(self, matrices: tuple[Matrix, ...], threads: int):
        self.matrices = matrices
        self.cols, self.kind = matrices[0].cols, matrices[0].format.kind
        self.record_bytes = record_bytes(self.kind, self.cols)
        self.total_rows = sum(m.rows for m in matrices)
        self.jobs = (self._job(1, threads), self._job(MATMAT_FROM, threads))

    def _job(self, tokens: int, threads: int) -> np.ndarray:
        job = np.zeros(FIRST_WEIGHT + W_WORDS * len(self.matrices), np.int64)
        job[COLUMNS], job[KIND], job[RECORD_BYTES] = self.cols, self.kind, self.record_bytes
        job[N_WEIGHTS] = len(self.matrices)
        chunk = max(16, min(256, self.total_rows // (8 * threads) // 16 * 16))
        first = 0
        for i, m in enumerate(self.matrices):
            at = FIRST_WEIGHT + W_WORDS * i
            job[at + W], job[at + STRIDE], job[at + ROWS] = m.address, m.stride, m.rows
            job[at + FIRST_CHUNK], job[at + CHUNK_ROWS] = first, chunk
            first += -(-m.rows // chunk)
        job[N_CHUNKS] = first
        return job

    def job(self, tokens: int) -> np.ndarray:
        """The record for that many tokens, its kernels compiled."""
        job = self.jobs[tokens >= MATMAT_FROM]
        if job[FIRST_WEIGHT + FUNCTION] == 0:
            for i, m in enumerate(self.matrices):
                job[FIRST_WEIGHT + W_WORDS * i + FUNCTION] = m.function(tokens)
        return job


class Workspace:
    """Memory the kernels of one pool share: records, their addresses, scratch of each thread."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self._scratch = np.empty(pool.threads * rows.SCRATCH + 64, np.uint8)
        self.scratch = -(-self._scratch.ctypes.data // 64) * 64
        self._records = self._pointers = np.empty(0, np.uint8)
        self.records = self.pointers = 0

    @property
    def buffers(self) -> tuple[np.ndarray, ...]:
        """The memory that addresses given out so far point to."""
        return self._scratch, self._records, self._pointers

    def reserve(self, tokens: int, size: int) -> None:
        """Room for `tokens` records of `size` bytes."""
        if tokens * size + 64 > self._records.size:
            self._records = np.empty(tokens * size + 64, np.uint8)
            self.records = -(-self._records.ctypes.data // 64) * 64
        if 8 * tokens > self._pointers.size:
            self._pointers = np.empty(8 * tokens, np.uint8)
            self.pointers = self._pointers.ctypes.data


def multiply(space: Workspace, plan: Plan, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """x float32 [T, N] contiguous -> one [T, rows] a weight of the plan."""
    tokens = len(x)
    space.reserve(tokens, plan.record_bytes)
    out = np.empty(tokens * plan.total_rows, np.float32)
    start(work_address(), plan.job(tokens), x, out, space.records, space.pointers, space.scratch,
          space.pool.state, space.pool.threads)
    if len(plan.matrices) == 1:
        return (out.reshape(tokens, plan.total_rows),)
    result, first = [], 0
    for m in plan.matrices:
        result.append(out[first : first + tokens * m.rows].reshape(tokens, m.rows))
        first += tokens * m.rows
    return tuple(result)


_address: list[int] = []


def work_address() -> int:
    if not _address:
        _address.append(work_function(work))
    return _address[0]
