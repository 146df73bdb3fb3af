"""Products of activations with quantized matrices in fused Triton kernels.

One launch serves all experts of a layer: job j of the grid multiplies the rows of x that go to
expert j. `vector_kernel` is for a few rows an expert (decode): weights are read once, unpacked in
registers, multiplied and summed. `dot_kernel` is for more: tiles through tl.dot (tensor cores).
A call with a second matrix (gate and up) applies the activation as well and writes only its result.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dali_gguf.offload.expert_pairs import Pairs
from dali_gguf.offload.triton_blocks import LAYOUTS
from dali_gguf.offload.triton_kernels import combine_kernel, dot_kernel, vector_kernel

VECTOR_ROWS = 4  # more rows of x than this for one matrix: tl.dot


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows of a matrix a program takes, and its warps; tests/gpu_check.py compares some."""

    vector_rows: int = 8
    vector_warps: int = 4
    dot_rows: int = 32
    dot_tokens: int = 32
    dot_warps: int = 4
    dot_stages: int = 2  # three would need more shared memory than older cards have


TILES = Tiles()
ACTIVATIONS = {"none": 0, "silu": 1, "swiglu_oai": 2}


def supports(kind: GGMLQuantizationType, cols: int) -> bool:
    """A fused kernel exists for rows of this many values."""
    return kind in LAYOUTS and cols % LAYOUTS[kind].unit == 0


class Jobs(NamedTuple):  # a dataclass would take a microsecond more to make
    """A table of pairs on the device: int64 [size], and the same bytes as float32."""

    pairs: Pairs
    table: Tensor
    floats: Tensor


class Matrices(NamedTuple):
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


def _pieces(n: int, size: int) -> int:
    """n / size, rounded up. triton.cdiv takes four microseconds."""
    return -(-n // size)


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
    tail = (
        out,
        m.rows,
        m.cols,
        row_bytes,
        int(m.kind),
        ACTIVATIONS[m.activation],
        m.bias is not None,
    )
    shape = (lay.groups, lay.run, lay.planes)
    if p.most <= VECTOR_ROWS:
        nt = 1 if p.most == 1 else 2 if p.most == 2 else 4
        grid = (_pieces(m.rows, TILES.vector_rows), p.n_jobs, 1)
        vector_kernel[grid](
            x,
            *middle,
            p.at_source,
            *tail,
            by_pair,
            nt,
            TILES.vector_rows,
            *shape,
            num_warps=TILES.vector_warps,
        )
        return out
    scaled, scale = half_rows(x)
    grid = (_pieces(m.rows, TILES.dot_rows), p.n_jobs, _pieces(p.most, TILES.dot_tokens))
    dot_kernel[grid](
        scaled,
        scale,
        *middle,
        p.at_source,
        *tail,
        by_pair,
        TILES.dot_tokens,
        TILES.dot_rows,
        *shape,
        num_warps=TILES.dot_warps,
        num_stages=TILES.dot_stages,
    )
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
    grid = (p.n_token, _pieces(cols, 256))
    combine_kernel[grid](
        y, jobs.table, jobs.floats, p.at_place, 2 * p.at_weights, out, p.n_used, cols, 256
    )
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
