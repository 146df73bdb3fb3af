"""KV cache and attention on a torch device: grouped heads, sliding window, sinks, MLA.

Scores are kept for a block of queries at a time, never as a whole T x T matrix. Softmax and sums
are float32 whatever the cache holds.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dali_gguf.device import Step
from dali_gguf.errors import InputError
from dali_gguf.offload.vram import SCORE_BYTES

Q8_BLOCK = 32


class TorchKV:
    """k [L, S, n_ctx, G, K] and v [L, S, n_ctx, G, V] on the device; v is None when v_size is 0.

    q8_0: int8 values and a half-precision scale for every 32 of them, as ggml rounds them.
    """

    def __init__(
        self,
        device: torch.device,
        n_layer: int,
        n_seq: int,
        n_ctx: int,
        n_head_kv: int,
        k_size: int,
        v_size: int,
        kv_type: str,
    ):
        if kv_type not in ("f16", "f32", "q8_0"):
            raise InputError(f"--kv-type {kv_type!r} is unknown: choose f16, q8_0 or f32")
        if kv_type == "q8_0" and (k_size % Q8_BLOCK or v_size % Q8_BLOCK):
            raise InputError(
                f"--kv-type q8_0 needs head sizes that are multiples of {Q8_BLOCK}, "
                f"found {k_size} and {v_size}: use f16"
            )
        self.kv_type = kv_type
        lead = (n_layer, n_seq, n_ctx, n_head_kv)
        self.k = self._empty(device, *lead, k_size)
        self.v = self._empty(device, *lead, v_size) if v_size else None

    def _empty(self, device: torch.device, *shape: int) -> tuple[Tensor, ...]:
        if self.kv_type == "q8_0":
            scales = (*shape[:-1], shape[-1] // Q8_BLOCK)
            return (
                torch.zeros(shape, dtype=torch.int8, device=device),
                torch.zeros(scales, dtype=torch.float16, device=device),
            )
        dtype = torch.float16 if self.kv_type == "f16" else torch.float32
        return (torch.zeros(shape, dtype=dtype, device=device),)

    def _pack(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [.., N] in the parts that the cache stores."""
        if self.kv_type != "q8_0":
            return (x,)
        blocks = x.unflatten(-1, (-1, Q8_BLOCK))
        scale = blocks.abs().amax(-1) / 127
        q = (blocks / scale.clamp_min(1e-30).unsqueeze(-1)).round()
        return q.to(torch.int8).flatten(-2), scale.to(torch.float16)

    @staticmethod
    def _unpack(parts: tuple[Tensor, ...]) -> Tensor:
        if len(parts) == 1:
            return parts[0].float()
        q, scale = parts
        return (q.unflatten(-1, (-1, Q8_BLOCK)).float() * scale.float().unsqueeze(-1)).flatten(-2)

    def store(self, layer: int, places: "Places", k: Tensor, v: Tensor | None) -> None:
        """k [T, G, K], v [T, G, V] at a step's places in a layer."""
        for cache, x in ((self.k, k), (self.v, v)):
            if cache is None:
                continue
            for part, packed in zip(cache, self._pack(x)):
                if places.row is not None:
                    seq, start, end = places.row
                    part[layer, seq, start:end].copy_(packed)  # a third of what indices cost
                else:
                    part[layer][places.sequences, places.positions] = packed.to(part.dtype)

    def read(
        self, layer: int, seq: int, start: int, end: int, raw: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """k [S, G, K] and v [S, G, V] of positions [start, end): float32, or (raw) as they lie."""
        both = []
        for cache in (self.k, self.v or ()):
            parts = tuple(part[layer, seq, start:end] for part in cache)
            both.append(parts[0] if raw and parts else self._unpack(parts) if parts else None)
        return both[0], both[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.k, *(self.v or ())))


def kv_bytes(
    n_layer: int, n_seq: int, n_ctx: int, n_head_kv: int, k_size: int, v_size: int, kv_type: str
) -> int:
    """Bytes that a TorchKV of this shape takes."""
    values = n_layer * n_seq * n_ctx * n_head_kv * (k_size + v_size)
    return {"f16": 2 * values, "f32": 4 * values, "q8_0": values + values // 16}[kv_type]


class Places:
    """Where a step's tokens lie in the cache; made once a step.

    stretches: (first, last + 1, sequence) of tokens that stand together. sequences, positions:
    int64 [T] on the device. row: (sequence, first, last + 1) of one sequence's consecutive
    positions, else None."""

    def __init__(self, step: Step, device: torch.device):
        self.stretches = [(a, b, int(step.sequences[a])) for a, b in runs(step.sequences)]
        self.sequences, self.positions = (
            torch.from_numpy(np.asarray(ids, np.int64)).to(device)
            for ids in (step.sequences, step.positions)
        )
        start, end = int(step.positions[0]), int(step.positions[-1]) + 1
        alone = len(self.stretches) == 1 and end - start == step.size
        self.row = (self.stretches[0][2], start, end) if alone else None


def runs(sequences: np.ndarray) -> list[tuple[int, int]]:
    """[first, last + 1) of each stretch of equal sequence ids in int32 [T]."""
    cuts = np.flatnonzero(np.diff(sequences)) + 1
    edges = [0, *cuts.tolist(), len(sequences)]
    return list(zip(edges[:-1], edges[1:]))


def attend(
    q: Tensor,
    cache: TorchKV,
    layer: int,
    seq: int,
    positions: np.ndarray,
    places: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    v_size: int,
) -> Tensor:
    """One sequence's queries q [T, H, K] at ascending positions [T] (places: the same on the
    device) over its cache: [T, H, V]."""
    n_head, longest = q.shape[1], int(positions[-1]) + 1
    rows = max(1, SCORE_BYTES // (4 * n_head * longest))
    half = q.is_cuda and sinks is None and cache.kv_type == "f16"
    out = []
    for first in range(0, len(positions), rows):
        pos = positions[first : first + rows]
        end = int(pos[-1]) + 1
        start = max(0, int(pos[0]) + 1 - window) if window else 0
        k, v = cache.read(layer, seq, start, end, half)
        v = k[..., :v_size] if v is None else v
        seen = _seen(places[first : first + rows], start, end, window)
        part = q[first : first + rows]
        if half:
            out.append(fused_block(part, k, v, seen, scale))
        else:
            out.append(_block(part, k, v, seen, scale, sinks))
    return out[0] if len(out) == 1 else torch.cat(out)


def _seen(places: Tensor, start: int, end: int, window: int) -> Tensor | None:
    """Which keys a query may look at, bool [T, S]; None when one query sees all of them."""
    if len(places) == 1:
        return None  # start and end were chosen for it
    keys, places = torch.arange(start, end, device=places.device), places[:, None]
    seen = keys <= places
    return seen & (keys > places - window) if window else seen


def fused_block(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """As _block without sinks, by torch's fused attention, in the type of k and v."""
    q, k, v = (x.to(k.dtype).transpose(0, 1)[None] for x in (q, k, v))  # [1, H or G, .., K]
    y = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    return y[0].transpose(0, 1).float()


def _block(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """q [T, H, K], k [S, G, K], v [S, G, V], seen [T, S] or None, sinks [H] or None: [T, H, V]."""
    t, n_head, _ = q.shape
    groups = k.shape[1]
    q = q.reshape(t, groups, n_head // groups, -1).permute(1, 2, 0, 3)  # [G, H/G, T, K]
    scores = (q.flatten(1, 2) @ k.permute(1, 2, 0)).unflatten(1, (-1, t)) * scale  # [G, H/G, T, S]
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.reshape(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    y = weights.flatten(1, 2) @ v.permute(1, 0, 2)  # [G, H/G * T, V]
    return y.unflatten(1, (-1, t)).permute(2, 0, 1, 3).reshape(t, n_head, -1)
