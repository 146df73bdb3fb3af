"""Whether products by AMX are right and faster on this machine: tried, and noted in amx_verdict.py.

Each weight type is tried in a process of its own (`python -m dali_gguf.kernels.amx_check TYPE`):
one that crashes or hangs only means that AMX is not used. `dali-gguf warmup` starts them.
"""

import ctypes
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.kernels import ahead, amx_verdict, isa, rows
from dali_gguf.kernels.amx_verdict import FAILED, Verdict
from dali_gguf.kernels.formats import (
    FORMATS, Format, matmat_amx_address, matmat_plain_address,
)
from dali_gguf.kernels.quantize import FLOAT, quantize_row, record_bytes

BLOCKS = ((16, 1), (21, 5), (40, 33))  # rows, and blocks of a row, that are compared
TOKENS = (*range(13, 41), 511)
TIMED_ROWS, TIMED_COLUMNS, TIMED_TOKENS, ROUNDS = 512, 2048, 32, 101
SECONDS = 300  # for one type, compiling included
CALL = ctypes.CFUNCTYPE(None, *(ctypes.c_ssize_t,) * 10)


class Problem:
    """Random weights and records of a type, and products of them by either function."""

    def __init__(self, fmt: Format, n_rows: int, n: int, tokens: int):
        rng, self.n_rows, self.n = np.random.default_rng(0), n_rows, n
        self.weights = random_weights(fmt, n_rows, n, rng)
        x = rng.standard_normal((tokens, n)).astype(np.float32)
        x[1::3] = np.sign(x[1::3, :1])  # all q 127 or all -127: the largest sums
        self.records = np.zeros((tokens, record_bytes(fmt.kind, n)), np.uint8)
        for row, record in zip(x, self.records):
            quantize_row(fmt.kind, row.ctypes.data, n, record.ctypes.data)
        order = rng.permutation(tokens)  # they lie anywhere, as an expert's do
        self.pointers = np.array([self.records[t].ctypes.data for t in order], np.intp)
        self.out = np.zeros((tokens, n_rows), np.float32)
        self.scratch = np.zeros(rows.SCRATCH, np.uint8)

    def run(self, function, tokens: int) -> np.ndarray:
        """The products' bits, uint32 [tokens, rows]."""
        w, out = self.weights, self.out
        function(w.ctypes.data, w.strides[0], 0, self.n_rows, self.n, self.pointers.ctypes.data,
                 tokens, out.ctypes.data, out.strides[0], self.scratch.ctypes.data)
        return out[:tokens].view(np.uint32).copy()


def random_weights(fmt: Format, n_rows: int, n: int, rng) -> np.ndarray:
    """uint8 [rows, row bytes]: any codes, scales that are not too large."""
    names, block = vars(fmt.module), fmt.block
    raw = rng.integers(0, 256, (n_rows, n // block, names["BYTES"]), dtype=np.uint8)
    for at in (names[name] for name in ("D_AT", "M_AT") if name in names):
        halves = rng.uniform(-0.02, 0.02, (n_rows, n // block, 1)).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8)
    if fmt.type == Q.MXFP4:
        raw[..., 0] = rng.integers(110, 130, raw.shape[:2])  # the exponent
    return raw.reshape(n_rows, -1)


def check(fmt: Format) -> Verdict:
    """Tried in this process, which a wrong instruction ends."""
    if not isa.AMX:
        return FAILED
    plain, tiles = CALL(matmat_plain_address(fmt)), CALL(matmat_amx_address(fmt))
    for n_rows, blocks in BLOCKS:
        problem = Problem(fmt, n_rows, blocks * fmt.block, max(TOKENS))
        for tokens in TOKENS:
            if (problem.run(plain, tokens) != problem.run(tiles, tokens)).any():
                return FAILED
    problem = Problem(fmt, TIMED_ROWS, TIMED_COLUMNS, TIMED_TOKENS)
    return Verdict(True, _speedup(problem, plain, tiles))


def _speedup(problem: Problem, plain, tiles) -> float:
    """How many times as fast tiles are as plain: medians of alternating runs."""
    without: list[float] = []
    with_tiles: list[float] = []
    for _ in range(ROUNDS):
        for function, times in ((plain, without), (tiles, with_tiles)):
            start = time.perf_counter()
            problem.run(function, TIMED_TOKENS)
            times.append(time.perf_counter() - start)
    return statistics.median(without) / statistics.median(with_tiles)


def find_out(types: Iterable[Q]) -> dict[str, Verdict]:
    """Verdicts of these types, added to those that are stored."""
    names = sorted(t.name for t in types if FORMATS[t].kind != FLOAT)
    found = {name: ask(["-m", "dali_gguf.kernels.amx_check", name]) for name in names}
    amx_verdict.write({**amx_verdict.read(), **found})
    return found


def ask(arguments: list[str]) -> Verdict:
    """What a Python process says with its last line."""
    process = ahead.start_python(arguments, subprocess.PIPE)
    try:
        text, _ = process.communicate(timeout=SECONDS)
        answer = json.loads(text.splitlines()[-1])
        return amx_verdict.checked(**answer) if process.returncode == 0 else FAILED
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return FAILED
    except (ValueError, IndexError, TypeError):
        return FAILED


def summary(found: dict[str, Verdict]) -> str:
    """One line: AMX: used for Q4_K (1.20x), not for Q6_K (0.80x)"""
    parts = []
    for good, text in ((True, "used for"), (False, "not for")):
        names = [
            f"{name} ({f'{v.speedup:.2f}x' if v.right else 'not right'})"
            for name, v in found.items() if v.good == good
        ]
        if names:
            parts.append(f"{text} {', '.join(names)}")
    return f"AMX: {', '.join(parts)}"


if __name__ == "__main__":
    print(json.dumps(asdict(check(FORMATS[Q[sys.argv[1]]]))))
