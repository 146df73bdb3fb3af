"""One budget of GPU memory for weights, KV cache, one step's scratch, and expert slots.

What is left after the first three is cut into slots, the same number of experts a layer; a few
spare slots of each size take experts that are copied for one step only.
"""

import re
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.config import ModelConfig
from dali_gguf.errors import InputError
from dali_gguf.offload.budget import available, parse_size, show_size
from dali_gguf.offload.memory_plan import demand_of
from dali_gguf.tensor import Tensor

SPARE = 16  # slots of each size for copies in flight: the ring of a prefill
SPARE_SHARE = 4  # at most a quarter of the expert memory becomes spare slots
RESERVE = 0.06  # of the free memory stays free: the driver, fragmentation, other programs
ALIGN = 256  # where a matrix may begin in its slot
FUSED = (Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.MXFP4)  # no dense copy
EXPERT_OF = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)(?:_exps|\.(\d+))\.weight$")
SCORE_BYTES = 64 << 20  # most memory one block of attention scores may take


def out_of_memory(error: RuntimeError) -> bool:
    """torch.OutOfMemoryError, and what other libraries raise for the same."""
    return "out of memory" in str(error).lower()


@dataclass(frozen=True, slots=True, eq=False)
class VramPlan:
    """Bytes by use. slots int64 [L]: resident experts of each layer with experts. spare: slots of
    each size besides. expert_bytes: all slots together, resident_bytes: without the spare ones;
    wanted: bytes of all experts."""

    room: int
    dense: int
    kv: int
    scratch: int
    slots: np.ndarray
    spare: int
    expert_bytes: int
    resident_bytes: int
    wanted: int

    @property
    def taken(self) -> int:
        return self.dense + self.kv + self.scratch + self.expert_bytes

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
    resident = int((slots * slot_bytes).sum())
    taken = resident + spare * int(sizes.sum())
    return VramPlan(room, dense, kv, scratch, slots, spare, taken, resident, wanted)


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


def plan_model(
    tensors: dict[str, Tensor],
    config: ModelConfig,
    room: int,
    n_ctx: int,
    n_seq: int = 1,
    n_batch: int = 512,
    kv_type: str = "f16",
    whole_layers: bool = False,
) -> VramPlan:
    """What of a model goes into `room` bytes of GPU memory. An embedding table that is only looked
    up stays in main memory."""
    demand = demand_of(tensors, config, n_ctx, n_seq, n_batch, kv_type)
    dense = demand.dense
    if "output.weight" in tensors and "token_embd.weight" in tensors:
        dense -= tensors["token_embd.weight"].nbytes
    scratch = demand.scratch + _attention(config, n_ctx, n_batch) + _dequantized(tensors)
    sizes = np.array(list(slot_bytes(tensors, config.experts.n_expert).values()), np.int64)
    n_expert = config.experts.n_expert
    return plan_vram(room, dense, demand.kv, scratch, sizes, n_expert, whole_layers)


def _attention(c: ModelConfig, n_ctx: int, n_batch: int) -> int:
    """Scores of a block of queries with their softmax, and one layer's keys in float32."""
    scores = min(SCORE_BYTES, 4 * c.n_head * n_batch * n_ctx)
    width = (c.kv_rank + c.rope.n_rot) if c.kv_rank else c.n_head_kv * (c.k_size + c.v_size)
    return 3 * scores + 2 * 4 * n_ctx * width


def slot_bytes(tensors: dict[str, Tensor], n_expert: int) -> dict[int, int]:
    """Bytes of an expert's slot in each layer with experts, by layer: gate, up and down, each
    aligned."""
    sizes: dict[int, int] = {}
    for name, t in tensors.items():
        found = EXPERT_OF.match(name)
        if not found:
            continue
        layer, role, single = int(found[1]), found[2], found[3]
        if single not in (None, "0"):
            continue
        nbytes = t.nbytes if single else t.nbytes // n_expert
        parts = 2 if role == "gate_up" else 1
        sizes[layer] = sizes.get(layer, 0) + parts * aligned(nbytes // parts)
    return dict(sorted(sizes.items()))


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _dequantized(tensors: dict[str, Tensor]) -> int:
    """Bytes that the largest matrix takes that has to be dequantized before its product."""
    plain = (
        t for t in tensors.values() if t.type not in FUSED and t.cols > 0 and len(t.shape) == 2
    )
    return max((3 * 4 * t.rows * t.cols for t in plain), default=0)


def parse(size: int | str) -> int:
    """Bytes of --vram. InputError if it is no size above 0."""
    try:
        return parse_size(str(size))
    except InputError:
        raise InputError(f"--vram {size!r} is not a size above 0: write it like 6G") from None


def budget(size: int | str | None, free: int, total: int) -> tuple[int, str | None]:
    """Bytes to use of a card, and a line to say if they are fewer than asked for. InputError for
    a size that is none or that the card does not have."""
    usable = int(free * (1 - RESERVE))
    if size is None:
        return usable, None
    wanted = parse(size)
    if wanted > total:
        raise InputError(
            f"--vram {show_size(wanted)}: the device has {show_size(total)}; give less, or leave "
            "--vram out to use what is free"
        )
    if wanted > usable:
        return usable, (
            f"--vram {show_size(wanted)} is more than is free; planning with {show_size(usable)}"
        )
    return wanted, None


def memory_of(device) -> tuple[int, int]:
    """(free, total) bytes of a torch.device; cpu-torch pretends with half of what is free."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)
    free = available().nbytes
    return free // 2, free
