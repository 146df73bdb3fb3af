"""Products of activations with quantized matrices in fused Triton kernels.

One launch serves all experts of a layer: job j of the grid multiplies the rows of x that go to
expert j. `vector_kernel` is for a few rows an expert (decode): weights are read once, unpacked in
registers, multiplied and summed. `dot_kernel` is for more: tiles through tl.dot (tensor cores).
A call with a second matrix (gate and up) applies the activation as well and writes only its result.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dali_gguf.offload.cuda_launch import Launch, check, is_plain, keep
from dali_gguf.offload.expert_launch import (
    CHANGING,
    CHANGING_SUM,
    OneToken,
    launch_experts,
    launch_grouped,
    launch_products,
)
from dali_gguf.offload.expert_pairs import Pairs
from dali_gguf.offload.pair_table import Jobs, PairTable
from dali_gguf.offload.triton_blocks import LAYOUTS
from dali_gguf.offload.triton_elementwise import rms_norm, rope  # noqa: F401  for the device
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


class Matrices:
    """What a launch multiplies with: matrices [rows, cols] of one type, at a job's offset + role
    (+ role2 for the second one of a pair) in the device's memory. Biases float32 [E, rows]. Made
    once for a weight, since it keeps the compiled kernels, and not changed after."""

    def __init__(
        self,
        kind: GGMLQuantizationType,
        rows: int,
        cols: int,
        role: int = 0,
        role2: int = 0,
        activation: str = "none",
        bias: Tensor | None = None,
        bias2: Tensor | None = None,
    ):
        self.rows, self.roles, self.biases = rows, (role, role2), (bias, bias2)
        lay, (block, block_bytes) = LAYOUTS[kind], GGML_QUANT_SIZES[kind]
        row_bytes = cols // block * block_bytes
        self.sizes = (rows, cols, row_bytes, int(kind), ACTIVATIONS[activation], bias is not None)
        self.shape = (lay.groups, lay.run, lay.planes)
        self.tiles = TILES
        self.kept: dict[tuple[int, bool], Launch] = {}  # by most rows of x for one, and by_pair


def _pieces(n: int, size: int) -> int:
    """n / size, rounded up. triton.cdiv takes four microseconds."""
    return -(-n // size)


def grouped(x: Tensor, base: Tensor, m: Matrices, jobs: Jobs, by_pair: bool = False) -> Tensor:
    """float32 [P, rows]: every pair's row of x times its expert's matrix in base, uint8. x
    [T, cols]; by_pair: x [P, cols], a row for each pair instead of each token."""
    p, x = jobs.pairs, x.contiguous()
    out = x.new_empty(p.n_pairs, m.rows)  # half the time of torch.empty
    if p.most > VECTOR_ROWS:
        return _grouped_dot(x, base, m, jobs, by_pair, out)
    key = p.most, by_pair
    plain, kept = is_plain(x), m.kept.get(key)
    if plain and kept is not None:
        where = x.data_ptr(), base.data_ptr(), jobs.address, p.n_jobs, out.data_ptr()
        check(launch_grouped(kept.entry, kept.numbers, kept.stream(), *where))
        return out
    nt = 1 if p.most == 1 else 2 if p.most == 2 else 4
    args = _arguments((x,), base, m, jobs, out, by_pair, nt, m.tiles.vector_rows)
    grid = (_pieces(m.rows, m.tiles.vector_rows), p.n_jobs, 1)
    made = vector_kernel[grid](*args, num_warps=m.tiles.vector_warps)
    if plain:
        keep(m.kept, key, made, grid, args, CHANGING)
    return out


def _grouped_dot(x: Tensor, base: Tensor, m: Matrices, jobs: Jobs, by_pair: bool,
                 out: Tensor) -> Tensor:
    """grouped by dot_kernel, for more rows of x."""
    p, tiles = jobs.pairs, m.tiles
    args = _arguments(half_rows(x), base, m, jobs, out, by_pair, tiles.dot_tokens, tiles.dot_rows)
    grid = (_pieces(m.rows, tiles.dot_rows), p.n_jobs, _pieces(p.most, tiles.dot_tokens))
    dot_kernel[grid](*args, num_warps=tiles.dot_warps, num_stages=tiles.dot_stages)
    return out


def _arguments(x: tuple[Tensor, ...], base: Tensor, m: Matrices, jobs: Jobs, out: Tensor,
               by_pair: bool, tokens: int, rows: int) -> tuple:
    """Of vector_kernel and dot_kernel, in order. tokens, rows: that a program takes. A bias that is
    not there is not read: out stands for it."""
    p = jobs.pairs
    bias, bias2 = (out if b is None else b for b in m.biases)
    where = p.at_expert, p.at_first, p.at_source
    given = (*x, base, *m.roles, bias, bias2, jobs.table, *where, out)
    return (*given, *m.sizes, by_pair, tokens, rows, *m.shape)


def half_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x in half precision and the scale of each row: its largest value becomes 1024, so that no
    row overflows (gpt-oss has activations beyond 65504) and few values get too small for a half.
    On the CPU (the interpreter) everything stays float32."""
    scale = x.abs().amax(dim=1).clamp_min(1e-20) / 1024
    dtype = torch.float16 if x.is_cuda else torch.float32
    return (x / scale[:, None]).to(dtype), scale


def combine(y: Tensor, jobs: Jobs, kept: dict[tuple[int, int], Launch]) -> Tensor:
    """float32 [T, D]: each token's pairs y [P, D] weighted and summed in slot order. kept: by
    columns and slots, of this device."""
    p, cols = jobs.pairs, y.shape[1]
    out = y.new_empty(p.n_token, cols)
    grid = (p.n_token, _pieces(cols, 256), 1)
    where = (p.at_place, 2 * p.at_weights)
    args = (y, jobs.table, jobs.floats, *where, out, p.n_used, cols, 256)
    made = combine_kernel[grid](*args)
    keep(kept, (cols, p.n_used), made, grid, args, CHANGING_SUM)
    return out


def experts(x: Tensor, base: Tensor, up: Matrices, down: Matrices, pairs: Pairs,
            table: PairTable) -> Tensor:
    """float32 [T, D]: combine of down of up, all from x [T, D]. table: that pairs was built in."""
    p, jobs = pairs, table.jobs(pairs)
    kept, space = kept_launches(up, down, p.most, p.n_used, table), table.space(up.rows, down.rows)
    if kept is None or p.n_pairs > len(space[0]) or not is_plain(x):
        y = grouped(grouped(x, base, up, jobs), base, down, jobs, by_pair=True)
        return combine(y, jobs, table.kept)
    out = x.new_empty(p.n_token, down.rows)
    launches = [launch.numbers for launch in kept]
    where = x.data_ptr(), base.data_ptr(), jobs.address, out.data_ptr()
    between = space[0].data_ptr(), space[1].data_ptr()
    numbers = p.n_jobs, p.at_place, p.at_weights, p.n_token
    check(launch_experts(kept[0].entry, *launches, kept[0].stream(), *where, *between, *numbers))
    return out


def kept_launches(up: Matrices, down: Matrices, most: int, n_used: int,
                  table: PairTable) -> tuple[Launch, Launch, Launch] | None:
    """Of up, down and the sum, if all of them have been launched before."""
    total = table.kept.get((down.rows, n_used))
    kept = up.kept.get((most, False)), down.kept.get((most, True)), total
    return kept if all(kept) else None


def one_token(up: Matrices, down: Matrices, n_used: int, table: PairTable) -> OneToken | None:
    """For steps of one token, once one has been made by experts."""
    kept = kept_launches(up, down, 1, n_used, table)
    return kept and OneToken(*kept, table, table.space(up.rows, down.rows))


@lru_cache(maxsize=64)
def _dense_jobs(n_token: int, device: torch.device) -> Jobs:
    """The table of one matrix that every row of x goes to."""
    tokens = np.arange(n_token)
    table = np.concatenate([[0, 0, 0, n_token], tokens, tokens, np.zeros((n_token + 1) // 2)])
    on_device = torch.from_numpy(table.astype(np.int64)).to(device)
    pairs = Pairs(table, 1, n_token, n_token, n_token, 1)
    return Jobs(pairs, on_device, on_device.view(torch.float32), on_device.data_ptr())


def matmul(x: Tensor, *weights: tuple[Tensor, Matrices]) -> tuple[Tensor, ...]:
    """x [T, cols] times the transpose of each matrix [rows, cols], (base, uint8; what it is):
    [T, rows] each."""
    jobs, key = _dense_jobs(len(x), x.device), (len(x), False)
    kept = [m.kept.get(key) for _, m in weights]
    if not (all(kept) and is_plain(x)):
        return tuple(grouped(x, base, m, jobs) for base, m in weights)
    outs = tuple(x.new_empty(len(x), m.rows) for _, m in weights)
    launches = tuple(launch.numbers for launch in kept)
    bases = tuple(base.data_ptr() for base, _ in weights)
    at = tuple(out.data_ptr() for out in outs)
    stream = kept[0].stream()
    check(launch_products(kept[0].entry, launches, stream, x.data_ptr(), bases, jobs.address, at))
    return outs
