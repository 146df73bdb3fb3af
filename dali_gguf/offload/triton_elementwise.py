"""Norms and rotary embedding in one launch each; as torch operations they are up to ten."""

from numba import njit
from torch import Tensor

from dali_gguf.device import RopeParams
from dali_gguf.offload.cuda_launch import GRID_X, Launch, check, is_plain, keep, run_with
from dali_gguf.offload.triton_kernels import norm_kernel, rope_kernel

CHANGING = {"rope": ("x", "weight", "cos", "sin", "out"), "norm": ("x", "weight", "out")}
NORM_WARPS = 4


@njit(cache=True)
def launch_rows(entry, launch, stream, n, addresses):
    """A Launch for n rows, whose changing arguments are a tuple of addresses. Returns CUresult."""
    launch[GRID_X] = n
    return run_with(entry, launch, stream, addresses)


def rope(x: Tensor, cos: Tensor, sin: Tensor, params: RopeParams,
         norm: tuple[Tensor, float] | None, kept: dict[tuple, Launch]) -> Tensor:
    """x [T, H, K] contiguous; cos, sin [T, 1, n_rot / 2]; norm: weight [K] and eps of an RMSNorm
    that comes first. kept: of this device."""
    n_token, n_head, size = x.shape
    weight, eps = norm or (None, 0.0)
    out = x.new_empty(n_token, n_head, size)
    half, block = params.n_rot // 2, 1 << (size - 1).bit_length()
    key = "rope", n_head, size, half, weight is None, eps, params.interleaved
    known, given = kept.get(key), out if weight is None else weight
    plain = is_plain(x) and is_plain(cos) and is_plain(sin) and is_plain(given)
    if known is not None and plain:
        at = tuple(tensor.data_ptr() for tensor in (x, given, cos, sin, out))
        check(launch_rows(known.entry, known.numbers, known.stream(), n_token, at))
        return out
    grid, constants = (n_token, n_head, 1), (half, weight is not None, eps, params.interleaved)
    args = (x, given, cos, sin, out, n_head, size, *constants, block)
    made = rope_kernel[grid](*args, num_warps=1)
    if plain:
        keep(kept, key, made, grid, args, CHANGING["rope"])
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, kept: dict[tuple, Launch]) -> Tensor:
    """x [.., N] contiguous, weight [N]. kept: of this device."""
    size, out = x.shape[-1], x.new_empty(x.shape)
    n, key = x.numel() // size, ("norm", size, eps)
    known, plain = kept.get(key), is_plain(x) and is_plain(weight)
    if known is not None and plain:
        at = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        check(launch_rows(known.entry, known.numbers, known.stream(), n, at))
        return out
    grid, args = (n, 1, 1), (x, weight, out, size, eps, 1 << (size - 1).bit_length())
    made = norm_kernel[grid](*args, num_warps=NORM_WARPS)
    if plain:
        keep(kept, key, made, grid, args, CHANGING["norm"])
    return out
