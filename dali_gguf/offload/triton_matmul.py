"""Products of activations with quantized matrices in fused Triton kernels.

One launch serves all experts of a layer: job j of the grid multiplies the rows of x that go to
expert j. `vector_kernel` is for a few rows an expert (decode): weights are read once, unpacked in
registers, multiplied and summed. `dot_kernel` is for more: tiles through tl.dot (tensor cores).
A call with a second matrix (gate and up) applies the activation as well and writes only its result.

The table of jobs is one int64 array in the device's memory, see expert_pairs.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dali_gguf.offload.expert_pairs import Pairs
from dali_gguf.offload.triton_blocks import LAYOUTS, plane

VECTOR_ROWS = 4  # more rows of x than this for one matrix: tl.dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a matrix a program takes, and its warps; tests/gpu_check.py compares some."""

    vector_rows: int = 8
    vector_warps: int = 4
    dot_rows: int = 32
    dot_tokens: int = 32
    dot_warps: int = 4


TILES = Tiles()
ACTIVATIONS = {"none": 0, "silu": 1, "swiglu_oai": 2}


def supports(kind: GGMLQuantizationType, cols: int) -> bool:
    """A fused kernel exists for rows of this many values."""
    return kind in LAYOUTS and cols % GGML_QUANT_SIZES[kind][0] == 0 and cols % LAYOUTS[kind].group == 0


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    if ACT == 2:  # gpt-oss: gate clamped from above, up from both sides
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def finish(acc, acc2, bias, bias2, expert, rows, n_rows, inside, ACT: tl.constexpr,
           BIAS: tl.constexpr):
    """Adds the biases of an expert to [.., R] and applies the activation."""
    if BIAS:
        acc += tl.load(bias + expert * n_rows + rows, mask=inside, other=0.0)[None, :]
        if ACT:
            acc2 += tl.load(bias2 + expert * n_rows + rows, mask=inside, other=0.0)[None, :]
    if ACT:
        acc = activate(acc, acc2, ACT)
    return acc


@triton.jit(do_not_specialize=["at_expert", "at_first", "at_source"])
def vector_kernel(x, base, role, role2, bias, bias2, jobs, at_expert, at_first, at_source, out,
                  n_rows, cols, row_bytes, KIND: tl.constexpr, ACT: tl.constexpr,
                  BIAS: tl.constexpr, BY_PAIR: tl.constexpr, NT: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
                  RUN: tl.constexpr, PLANES: tl.constexpr):
    """out[p, r] for NT pairs p and R rows r. Grid: row tiles, jobs, pair tiles."""
    job = tl.program_id(1)
    first = tl.load(jobs + at_first + job) + tl.program_id(2) * NT
    last = tl.load(jobs + at_first + job + 1)
    if first >= last:
        return
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    pairs = first + tl.arange(0, NT)
    source = tl.where(pairs < last, pairs, first)
    if not BY_PAIR:
        source = tl.load(jobs + at_source + source)
    weights = base + tl.load(jobs + job) + (tl.minimum(rows, n_rows - 1).to(tl.int64) * row_bytes)[:, None, None]
    x_row = x + (source * cols)[:, None, None, None]
    i = tl.arange(0, RUN)[None, None, :]
    n_group = cols // (RUN * PLANES)
    acc = tl.zeros((NT, R, G, RUN), tl.float32)
    acc2 = tl.zeros((NT, R, G, RUN), tl.float32)
    for at in range(0, n_group, G):
        g = at + tl.arange(0, G)[None, :, None]
        here = tl.minimum(g, n_group - 1)
        for p in tl.static_range(PLANES):
            column = here * (RUN * PLANES) + p * RUN + i
            a = tl.load(x_row + column[None], mask=(g < n_group)[None], other=0.0)
            acc += a * plane(weights + role, here, i, p, KIND)[None]
            if ACT:
                acc2 += a * plane(weights + role2, here, i, p, KIND)[None]
    total = tl.sum(tl.sum(acc, axis=3), axis=2)
    total2 = tl.sum(tl.sum(acc2, axis=3), axis=2)
    expert = tl.load(jobs + at_expert + job)
    total = finish(total, total2, bias, bias2, expert, rows, n_rows, inside, ACT, BIAS)
    where = out + (pairs * n_rows)[:, None] + rows[None, :]
    tl.store(where, total, mask=(pairs < last)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["at_expert", "at_first", "at_source"])
def dot_kernel(x, x_scale, base, role, role2, bias, bias2, jobs, at_expert, at_first, at_source,
               out, n_rows, cols, row_bytes, KIND: tl.constexpr, ACT: tl.constexpr,
               BIAS: tl.constexpr, BY_PAIR: tl.constexpr, NT: tl.constexpr, R: tl.constexpr, G: tl.constexpr,
               RUN: tl.constexpr, PLANES: tl.constexpr):
    """As vector_kernel, with tl.dot. x is half precision, divided by x_scale [rows of x]."""
    job = tl.program_id(1)
    first = tl.load(jobs + at_first + job) + tl.program_id(2) * NT
    last = tl.load(jobs + at_first + job + 1)
    if first >= last:
        return
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n_rows
    pairs = first + tl.arange(0, NT)
    source = tl.where(pairs < last, pairs, first)
    if not BY_PAIR:
        source = tl.load(jobs + at_source + source)
    weights = base + tl.load(jobs + job) + (tl.minimum(rows, n_rows - 1).to(tl.int64) * row_bytes)[:, None, None]
    x_row = x + (source * cols)[:, None]
    i = tl.arange(0, RUN)[None, None, :]
    k = tl.arange(0, G * RUN)
    n_group = cols // (RUN * PLANES)
    acc = tl.zeros((NT, R), tl.float32)
    acc2 = tl.zeros((NT, R), tl.float32)
    for at in range(0, n_group, G):
        here = tl.minimum(at + tl.arange(0, G), n_group - 1)[None, :, None]
        group = at + k // RUN
        for p in tl.static_range(PLANES):
            column = group * (RUN * PLANES) + p * RUN + k % RUN
            a = tl.load(x_row + column[None, :], mask=(group < n_group)[None, :], other=0.0)
            w = tl.reshape(plane(weights + role, here, i, p, KIND), (R, G * RUN)).to(a.dtype)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
            if ACT:
                w = tl.reshape(plane(weights + role2, here, i, p, KIND), (R, G * RUN)).to(a.dtype)
                acc2 = tl.dot(a, tl.trans(w), acc2, input_precision="ieee")
    scale = tl.load(x_scale + source)[:, None]
    expert = tl.load(jobs + at_expert + job)
    total = finish(acc * scale, acc2 * scale, bias, bias2, expert, rows, n_rows, inside, ACT, BIAS)
    where = out + (pairs * n_rows)[:, None] + rows[None, :]
    tl.store(where, total, mask=(pairs < last)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["at_place", "at_weights"])
def combine_kernel(pairs, jobs, weights, at_place, at_weights, out, n_used, cols, B: tl.constexpr):
    """out[t] = sum over slots a, in order, of weights[t, a] * pairs[place[t, a]]; place < 0: none."""
    t, d = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for a in range(0, n_used):
        place = tl.load(jobs + at_place + t * n_used + a)
        weight = tl.load(weights + at_weights + t * n_used + a)
        row = tl.load(pairs + tl.maximum(place, 0) * cols + d, mask=d < cols, other=0.0)
        acc += tl.where(place >= 0, weight, 0.0) * row
    tl.store(out + t.to(tl.int64) * cols + d, acc, mask=d < cols)


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """A table of pairs on the device: int64 [size], and the same bytes as float32."""

    pairs: Pairs
    table: Tensor
    floats: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """What a launch multiplies with: matrices [rows, cols] of one type in the bytes of `base`, at
    a job's offset + role (+ role2 for the second one of a pair). Biases float32 [E, rows]."""

    base: Tensor
    kind: GGMLQuantizationType
    rows: int
    cols: int
    role: int = 0
    role2: int = 0
    activation: str = "none"
    bias: Tensor | None = None
    bias2: Tensor | None = None


def grouped(x: Tensor, m: Matrices, jobs: Jobs, by_pair: bool = False) -> Tensor:
    """float32 [P, rows]: every pair's row of x times its expert's matrix. x [T, cols]; by_pair:
    x [P, cols], a row for each pair instead of each token."""
    p = jobs.pairs
    out = torch.empty((p.n_pairs, m.rows), dtype=torch.float32, device=x.device)
    lay, x = LAYOUTS[m.kind], x.contiguous()
    block, block_bytes = GGML_QUANT_SIZES[m.kind]
    row_bytes = m.cols // block * block_bytes
    bias, bias2 = (out if b is None else b for b in (m.bias, m.bias2))
    middle = (m.base, m.role, m.role2, bias, bias2, jobs.table, p.at_expert, p.at_first)
    tail = (out, m.rows, m.cols, row_bytes, int(m.kind), ACTIVATIONS[m.activation],
            m.bias is not None)
    shape = (lay.groups, lay.run, lay.planes)
    if p.most <= VECTOR_ROWS:
        nt = 1 if p.most == 1 else 2 if p.most == 2 else 4
        grid = (triton.cdiv(m.rows, TILES.vector_rows), p.n_jobs, 1)
        vector_kernel[grid](x, *middle, p.at_source, *tail, by_pair, nt, TILES.vector_rows, *shape,
                            num_warps=TILES.vector_warps)
        return out
    scaled, scale = half_rows(x)
    grid = (triton.cdiv(m.rows, TILES.dot_rows), p.n_jobs, triton.cdiv(p.most, TILES.dot_tokens))
    dot_kernel[grid](scaled, scale, *middle, p.at_source, *tail, by_pair, TILES.dot_tokens,
                     TILES.dot_rows, *shape, num_warps=TILES.dot_warps)
    return out


def half_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in half precision and the scale of each row: its largest value becomes 1024, so that no
    row overflows (gpt-oss has activations beyond 65504) and few values get too small for a half.
    On the CPU (the interpreter) everything stays float32."""
    scale = x.abs().amax(dim=1).clamp_min(1e-20) / 1024
    dtype = torch.float16 if x.is_cuda else torch.float32
    return (x / scale[:, None]).to(dtype), scale


def combine(y: Tensor, jobs: Jobs) -> Tensor:
    """float32 [T, D]: each token's pairs y [P, D] weighted and summed in slot order."""
    p, cols = jobs.pairs, y.shape[1]
    out = torch.empty((p.n_token, cols), dtype=torch.float32, device=y.device)
    grid = (p.n_token, triton.cdiv(cols, 256))
    combine_kernel[grid](y, jobs.table, jobs.floats, p.at_place, 2 * p.at_weights, out, p.n_used,
                         cols, 256)
    return out


@lru_cache(maxsize=64)
def _dense_jobs(n_token: int, device: torch.device) -> Jobs:
    """The table of one matrix that every row of x goes to."""
    tokens = np.arange(n_token)
    table = np.concatenate([[0, 0, 0, n_token], tokens, tokens, np.zeros((n_token + 1) // 2)])
    on_device = torch.from_numpy(table.astype(np.int64)).to(device)
    pairs = Pairs(table, 1, n_token, n_token, n_token, 1)
    return Jobs(pairs, on_device, on_device.view(torch.float32))


def matmul(x: Tensor, data: Tensor, kind: GGMLQuantizationType, rows: int) -> Tensor:
    """x [T, N] times the transpose of a matrix [rows, N] of uint8 blocks: [T, rows]."""
    return grouped(x, Matrices(data, kind, rows, x.shape[1]), _dense_jobs(len(x), x.device))
