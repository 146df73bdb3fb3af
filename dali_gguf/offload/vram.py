"""One budget of GPU memory for weights, KV cache, one step's scratch, and expert slots.

What is left after the first three is cut into slots, the same number of experts a layer; a few
spare slots of each size take experts that are copied for one step only.
"""

from dataclasses import dataclass

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.errors import InputError
from dali_gguf.offload.budget import parse_size, show_size

SPARE = 16  # slots of each size for copies in flight: the ring of a prefill
SPARE_SHARE = 4  # at most a quarter of the expert memory becomes spare slots
RESERVE = 0.06  # of the free memory stays free: the driver, fragmentation, other programs
SCORES = 3 * (64 << 20)  # attention: scores, their softmax, and keys in float32


@dataclass(frozen=True, slots=True, eq=False)
class VramPlan:
    """Bytes by use. slots int64 [L]: resident experts of each layer with experts. spare: slots of
    each size besides. expert_bytes: all slots together; wanted: bytes of all experts."""

    room: int
    dense: int
    kv: int
    scratch: int
    slots: np.ndarray
    spare: int
    expert_bytes: int
    wanted: int

    @property
    def fits(self) -> bool:
        """Whether everything but experts fits at all."""
        return self.dense + self.kv + self.scratch <= self.room

    def line(self, n_expert: int) -> str:
        share = self.slots.sum() / max(1, len(self.slots) * n_expert)
        return (
            f"GPU memory {show_size(self.room)}: weights {show_size(self.dense)}, KV cache "
            f"{show_size(self.kv)}, scratch {show_size(self.scratch)}, experts "
            f"{show_size(self.expert_bytes)} of {show_size(self.wanted)} ({share:.0%} resident)"
        )


def plan_vram(
    room: int,
    dense: int,
    kv: int,
    scratch: int,
    slot_bytes: np.ndarray,
    n_expert: int,
    whole_layers: bool = False,
) -> VramPlan:
    """slot_bytes int64 [L]: an expert's slot in each layer with experts. whole_layers: experts of
    the last layers only (the static split of llama.cpp), instead of some of each layer."""
    left = max(0, room - dense - kv - scratch)
    sizes = np.unique(slot_bytes)
    wanted = int(slot_bytes.sum()) * n_expert
    if left >= wanted:
        slots, spare = np.full(len(slot_bytes), n_expert, np.int64), 0
    elif whole_layers:
        slots, spare = _last_layers(left, slot_bytes, n_expert), 0
    else:
        spare = min(SPARE, int(left // SPARE_SHARE // max(1, sizes.sum())))
        slots = _even(left - spare * int(sizes.sum()), slot_bytes, n_expert)
    taken = int((slots * slot_bytes).sum()) + spare * int(sizes.sum())
    return VramPlan(room, dense, kv, scratch, slots, spare, taken, wanted)


def _even(left: int, slot_bytes: np.ndarray, n_expert: int) -> np.ndarray:
    """The same number a layer, and one more in the first layers while it fits."""
    each = min(n_expert, left // max(1, int(slot_bytes.sum())))
    slots = np.full(len(slot_bytes), each, np.int64)
    left -= each * int(slot_bytes.sum())
    for i, size in enumerate(slot_bytes.tolist()):
        if each < n_expert and left >= size:
            slots[i] += 1
            left -= size
    return slots


def _last_layers(left: int, slot_bytes: np.ndarray, n_expert: int) -> np.ndarray:
    slots = np.zeros(len(slot_bytes), np.int64)
    for i in range(len(slot_bytes) - 1, -1, -1):
        left -= n_expert * int(slot_bytes[i])
        if left < 0:
            break
        slots[i] = n_expert
    return slots


def scratch_bytes(c: ModelConfig, n_batch: int, n_seq: int, largest_dense: int = 0) -> int:
    """An upper bound of what one step of n_batch tokens allocates at a time. largest_dense: bytes
    of the largest matrix that has to be dequantized because no fused kernel takes its type."""
    e = c.experts
    row = 8 * c.n_embd + 4 * c.n_head * (c.k_size + c.v_size) + 3 * max(c.n_ff, e.n_ff_shared)
    row += e.n_used * (3 * (e.n_ff or c.n_ff) + 2 * c.n_embd) if e.n_expert else 0
    return 4 * (n_batch * row + max(n_seq, 1) * c.n_vocab) + SCORES + largest_dense


def budget(text: str | int | None, free: int, total: int) -> tuple[int, str | None]:
    """Bytes to use of a card, and a line to say if they are fewer than asked for. InputError for
    a size that is none or that the card does not have."""
    usable = int(free * (1 - RESERVE))
    if text is None:
        return usable, None
    try:
        wanted = parse_size(str(text))
    except InputError:
        raise InputError(
            f"--vram {text!r} is not a size above 0: write it like 6G or 512M"
        ) from None
    if wanted > total:
        raise InputError(
            f"--vram {text}: the device has {show_size(total)}; give less, or leave "
            "--vram out to use what is free"
        )
    if wanted > usable:
        return usable, (
            f"--vram {show_size(wanted)} is more than is free; planning with {show_size(usable)}"
        )
    return wanted, None
