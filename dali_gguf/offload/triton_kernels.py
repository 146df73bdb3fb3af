"""Triton kernels: quantized matrices times activations, a whole table of jobs in one launch.

Job j multiplies the rows of x that go to expert j. The table is one int64 array in the device's
memory, see expert_pairs.py; at_expert, at_first, at_source say where its parts begin.
"""

import triton
import triton.language as tl

from dali_gguf.offload.triton_blocks import column, fetch, plane


@triton.jit
def activate(gate, up, ACT: tl.constexpr):
    if ACT == 2:  # gpt-oss: gate clamped from above, up from both sides
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1 + tl.exp(-1.702 * gate)) * (up + 1)
    return gate / (1 + tl.exp(-gate)) * up


@triton.jit
def finish(
    acc, acc2, bias, bias2, expert, rows, n_rows, inside, ACT: tl.constexpr, BIAS: tl.constexpr
):
    """Adds the biases of an expert to [.., R] and applies the activation."""
    if BIAS:
        acc += tl.load(bias + expert * n_rows + rows, mask=inside, other=0.0)[None, :]
        if ACT:
            acc2 += tl.load(bias2 + expert * n_rows + rows, mask=inside, other=0.0)[None, :]
    if ACT:
        acc = activate(acc, acc2, ACT)
    return acc


@triton.jit(do_not_specialize=["at_expert", "at_first", "at_source"])
def vector_kernel(x, base, role, role2, bias, bias2, jobs, at_expert, at_first, at_source,
                  out, n_rows, cols, row_bytes, KIND: tl.constexpr, ACT: tl.constexpr,
                  BIAS: tl.constexpr, BY_PAIR: tl.constexpr, NT: tl.constexpr, R: tl.constexpr,
                  G: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr):
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
    start = base + tl.multiple_of(tl.load(jobs + job), 16)  # slots and matrices are aligned
    weights = start + (tl.minimum(rows, n_rows - 1).to(tl.int64) * row_bytes)[:, None, None]
    x_row = x + (source * cols)[:, None, None, None]
    i = tl.arange(0, RUN)[None, None, :]
    n_group = cols // (RUN * PLANES)
    acc = tl.zeros((NT, R, G, RUN), tl.float32)
    acc2 = tl.zeros((NT, R, G, RUN), tl.float32)
    for at in range(0, n_group, G):
        g = at + tl.arange(0, G)[None, :, None]
        here = tl.minimum(g, n_group - 1)
        raw = fetch(weights + role, here, i, KIND)
        raw2 = raw
        if ACT:
            raw2 = fetch(weights + role2, here, i, KIND)
        for p in tl.static_range(PLANES):
            at_x = x_row + (column(here, p, KIND) + i)[None]
            a = tl.load(at_x, mask=(g < n_group)[None], other=0.0)
            acc += a * plane(raw, p, KIND)[None]
            if ACT:
                acc2 += a * plane(raw2, p, KIND)[None]
    total = tl.sum(tl.sum(acc, axis=3), axis=2)
    total2 = tl.sum(tl.sum(acc2, axis=3), axis=2)
    expert = tl.load(jobs + at_expert + job)
    total = finish(total, total2, bias, bias2, expert, rows, n_rows, inside, ACT, BIAS)
    where = out + (pairs * n_rows)[:, None] + rows[None, :]
    tl.store(where, total, mask=(pairs < last)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["at_expert", "at_first", "at_source"])
def dot_kernel(x, x_scale, base, role, role2, bias, bias2, jobs, at_expert, at_first, at_source,
               out, n_rows, cols, row_bytes, KIND: tl.constexpr, ACT: tl.constexpr,
               BIAS: tl.constexpr, BY_PAIR: tl.constexpr, NT: tl.constexpr, R: tl.constexpr,
               G: tl.constexpr, RUN: tl.constexpr, PLANES: tl.constexpr):
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
    start = base + tl.multiple_of(tl.load(jobs + job), 16)  # slots and matrices are aligned
    weights = start + (tl.minimum(rows, n_rows - 1).to(tl.int64) * row_bytes)[:, None, None]
    x_row = x + (source * cols)[:, None]
    i = tl.arange(0, RUN)[None, None, :]
    k = tl.arange(0, G * RUN)
    n_group = cols // (RUN * PLANES)
    acc = tl.zeros((NT, R), tl.float32)
    acc2 = tl.zeros((NT, R), tl.float32)
    for at in range(0, n_group, G):
        here = tl.minimum(at + tl.arange(0, G), n_group - 1)[None, :, None]
        group = at + k // RUN
        raw = fetch(weights + role, here, i, KIND)
        raw2 = raw
        if ACT:
            raw2 = fetch(weights + role2, here, i, KIND)
        for p in tl.static_range(PLANES):
            at_x = x_row + (column(group, p, KIND) + k % RUN)[None, :]
            a = tl.load(at_x, mask=(group < n_group)[None, :], other=0.0)
            w = tl.reshape(plane(raw, p, KIND), (R, G * RUN)).to(a.dtype)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
            if ACT:
                w = tl.reshape(plane(raw2, p, KIND), (R, G * RUN)).to(a.dtype)
                acc2 = tl.dot(a, tl.trans(w), acc2, input_precision="ieee")
    scale = tl.load(x_scale + source)[:, None]
    expert = tl.load(jobs + at_expert + job)
    total = finish(acc * scale, acc2 * scale, bias, bias2, expert, rows, n_rows, inside, ACT, BIAS)
    where = out + (pairs * n_rows)[:, None] + rows[None, :]
    tl.store(where, total, mask=(pairs < last)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["at_place", "at_weights"])
def combine_kernel(pairs, jobs, weights, at_place, at_weights, out, n_used, cols, B: tl.constexpr):
    """out[t] = sum over slots a, in order, of weights[t, a] * pairs[place[t, a]], if place >= 0."""
    t, d = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    acc = tl.zeros((B,), tl.float32)
    for a in range(0, n_used):
        place = tl.load(jobs + at_place + t * n_used + a)
        weight = tl.load(weights + at_weights + t * n_used + a)
        row = tl.load(pairs + tl.maximum(place, 0) * cols + d, mask=d < cols, other=0.0)
        acc += tl.where(place >= 0, weight, 0.0) * row
    tl.store(out + t.to(tl.int64) * cols + d, acc, mask=d < cols)


@triton.jit
def rope_kernel(x, weight, cos, sin, out, n_head, size, HALF: tl.constexpr, NORM: tl.constexpr,
                EPS: tl.constexpr, INTERLEAVED: tl.constexpr, B: tl.constexpr):
    """out = x [T, H, size], each head normalized first (NORM: RMS, times weight [size]), its first
    2 * HALF dimensions turned by cos, sin [T, HALF]. B: a power of two from size up."""
    t = tl.program_id(0).to(tl.int64)
    head = (t * n_head + tl.program_id(1)) * size
    i, d = tl.arange(0, B // 2), tl.arange(0, B)
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + HALF
    turned, rest = i < HALF, (d >= 2 * HALF) & (d < size)
    a = tl.load(x + head + first, mask=turned, other=0.0)
    b = tl.load(x + head + second, mask=turned, other=0.0)
    tail = tl.load(x + head + d, mask=rest, other=0.0)
    if NORM:
        total = tl.sum(a * a + b * b, axis=0) + tl.sum(tail * tail, axis=0)
        scale = 1 / tl.sqrt(total / size + EPS)
        a *= scale * tl.load(weight + first, mask=turned, other=0.0)
        b *= scale * tl.load(weight + second, mask=turned, other=0.0)
        tail *= scale * tl.load(weight + d, mask=rest, other=0.0)
    c = tl.load(cos + t * HALF + i, mask=turned, other=0.0)
    s = tl.load(sin + t * HALF + i, mask=turned, other=0.0)
    tl.store(out + head + first, a * c - b * s, mask=turned)
    tl.store(out + head + second, b * c + a * s, mask=turned)
    tl.store(out + head + d, tail, mask=rest)


@triton.jit
def norm_kernel(x, weight, out, size, EPS: tl.constexpr, B: tl.constexpr):
    """out = RMSNorm of x [N, size], times weight [size]. B: a power of two from size up."""
    row, d = tl.program_id(0).to(tl.int64) * size, tl.arange(0, B)
    v = tl.load(x + row + d, mask=d < size, other=0.0)
    scale = 1 / tl.sqrt(tl.sum(v * v, axis=0) / size + EPS)
    w = tl.load(weight + d, mask=d < size, other=0.0)
    tl.store(out + row + d, v * scale * w, mask=d < size)
