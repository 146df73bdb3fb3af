"""What the Triton kernels do, in numpy, from the arguments of a launch: memory by its address."""

import ctypes

import numpy as np
from gguf import GGMLQuantizationType, quants

from tests.numpy_device import silu, swiglu_oai


def at(address: int, size: int, kind) -> np.ndarray:
    """[size] numbers in memory, to read or write."""
    nbytes = size * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), kind)


def run(name: str, a: dict) -> None:
    if name == "combine_kernel":
        _combine(a)
    elif name == "rope_kernel":
        _rope(a)
    elif name == "norm_kernel":
        _norm(a)
    else:
        _grouped(a, at(a["x_scale"], _x_rows(a), np.float32) if name == "dot_kernel" else None)


def _x_rows(a: dict) -> int:
    """Rows of x that are read, at most."""
    n_job, jobs = a["grid"][1], a["jobs"]
    last = int(at(jobs + 8 * a["at_first"], n_job + 1, np.int64)[-1])
    if a["BY_PAIR"]:
        return last
    return int(at(jobs + 8 * a["at_source"], last, np.int64).max(initial=0)) + 1


def _grouped(a: dict, scale: np.ndarray | None) -> None:
    n_job, rows, cols = a["grid"][1], a["n_rows"], a["cols"]
    offsets = at(a["jobs"], n_job, np.int64)
    experts = at(a["jobs"] + 8 * a["at_expert"], n_job, np.int64)
    first = at(a["jobs"] + 8 * a["at_first"], n_job + 1, np.int64)
    source = at(a["jobs"] + 8 * a["at_source"], int(first[-1]), np.int64)
    source = np.arange(first[-1]) if a["BY_PAIR"] else source
    x = at(a["x"], _x_rows(a) * cols, np.float32).reshape(-1, cols)
    x = x if scale is None else x * scale[:, None]
    out = at(a["out"], int(first[-1]) * rows, np.float32).reshape(-1, rows)
    for j in range(n_job):
        mine = slice(first[j], first[j + 1])
        y = [_product(a, x[source[mine]], int(offsets[j]) + a[role]) for role in ("role", "role2")]
        if a["BIAS"]:
            for i, bias in enumerate(("bias", "bias2")[: 1 + bool(a["ACT"])]):
                y[i] += at(a[bias] + 4 * rows * int(experts[j]), rows, np.float32)
        gate, up = y
        out[mine] = (gate, silu(gate) * up, swiglu_oai(gate, up))[a["ACT"]]


def _product(a: dict, x: np.ndarray, start: int) -> np.ndarray:
    kind = GGMLQuantizationType(a["KIND"])
    raw = at(a["base"] + start, a["n_rows"] * a["row_bytes"], np.uint8)
    return x @ quants.dequantize(raw.reshape(a["n_rows"], -1), kind).T.astype(np.float32)


def _combine(a: dict) -> None:
    n_token, cols, used = a["grid"][0], a["cols"], a["n_used"]
    place = at(a["jobs"] + 8 * a["at_place"], n_token * used, np.int64).reshape(n_token, used)
    weights = at(a["weights"] + 4 * a["at_weights"], n_token * used, np.float32)
    weights = np.where(place < 0, np.float32(0), weights.reshape(n_token, used))
    pairs = at(a["pairs"], (int(place.max()) + 1) * cols, np.float32).reshape(-1, cols)
    out = at(a["out"], n_token * cols, np.float32).reshape(n_token, cols)
    out[:] = np.einsum("ta,tad->td", weights, pairs[np.maximum(place, 0)])


def _rope(a: dict) -> None:
    (n_token, n_head, _), size, half = a["grid"], a["size"], a["HALF"]
    x, out = (at(a[k], n_token * n_head * size, np.float32) for k in ("x", "out"))
    x, out = (v.reshape(n_token, n_head, size) for v in (x, out))
    if a["NORM"]:
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(a["EPS"]))
        x = x * scale * at(a["weight"], size, np.float32)
    c, s = (at(a[k], n_token * half, np.float32).reshape(n_token, 1, half) for k in ("cos", "sin"))
    pairs = x[..., : 2 * half]
    turned = a["INTERLEAVED"]
    first, second = (pairs[..., 0::2], pairs[..., 1::2]) if turned else np.split(pairs, 2, -1)
    both = first * c - second * s, second * c + first * s
    together = np.stack(both, -1).reshape(pairs.shape) if turned else np.concatenate(both, -1)
    out[:] = np.concatenate([together, x[..., 2 * half :]], -1)


def _norm(a: dict) -> None:
    n, size = a["grid"][0], a["size"]
    x, out = (at(a[k], n * size, np.float32).reshape(n, size) for k in ("x", "out"))
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(a["EPS"]))
    out[:] = x * scale * at(a["weight"], size, np.float32)
