"""Norm of each head and rotary embedding in one launch; as torch operations they are ten."""

from numba import njit
from torch import Tensor

from dali_gguf.device import RopeParams
from dali_gguf.offload.cuda_launch import GRID_X, HEAD, STREAM, Launch, check, is_plain, run, suits
from dali_gguf.offload.triton_kernels import rope_kernel

CHANGING = ("x", "weight", "cos", "sin", "out")


@njit(cache=True)
def launch_rope(entry, launch, stream, n_token, x, weight, cos, sin, out):
    """A Launch of rope_kernel. Returns CUresult."""
    launch[STREAM], launch[GRID_X] = stream, n_token
    values = x, weight, cos, sin, out
    for i in range(len(values)):
        launch[launch[HEAD + i]] = values[i]
    return run(entry, launch)


def rope(x: Tensor, cos: Tensor, sin: Tensor, params: RopeParams,
         norm: tuple[Tensor, float] | None, kept: dict[tuple, Launch]) -> Tensor:
    """x [T, H, K] contiguous; cos, sin [T, 1, n_rot / 2]; norm: weight [K] and eps of an RMSNorm
    that comes first. kept: of this device."""
    n_token, n_head, size = x.shape
    weight, eps = norm or (None, 0.0)
    out = x.new_empty(n_token, n_head, size)
    half, block = params.n_rot // 2, 1 << (size - 1).bit_length()
    key = n_head, size, half, weight is None, eps, params.interleaved
    known = kept.get(key)
    plain = is_plain(x) and is_plain(cos) and is_plain(sin)
    if known is not None and plain:
        at_weight = 0 if weight is None else weight.data_ptr()
        at = x.data_ptr(), at_weight, cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        check(launch_rope(known.entry, known.numbers, known.stream(), n_token, *at))
        return out
    grid, given = (n_token, n_head, 1), out if weight is None else weight
    constants = half, weight is not None, eps, params.interleaved, block
    args = (x, given, cos, sin, out, n_head, size, *constants)
    made = rope_kernel[grid](*args, num_warps=1)
    if plain and suits(made):
        kept[key] = Launch(made, grid, args, CHANGING)
    return out
