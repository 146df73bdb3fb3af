"""Does the model fit in memory, and if not, how much is left for experts?"""

import re
from dataclasses import dataclass, replace

from dali_gguf.config import ModelConfig
from dali_gguf.errors import MemoryBudgetError
from dali_gguf.offload.budget import MACHINE, Room, show_size
from dali_gguf.tensor import Tensor

EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.weight")
KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "f32": 4.0}
RUNTIME = 160 << 20  # what grows after loading: compiled kernels, Python, thread stacks
SPARE = 0.10  # of what the machine has: other programs live there too
SPARE_OWN = 0.03  # of a memory group's limit or of --ram: nobody else takes from it


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes the model needs: experts, all other weights, KV cache, activations of a step. With a
    GPU: on_gpu, part of the experts that it holds, and staging, the buffers of copies to it."""

    experts: int
    dense: int
    kv: int
    scratch: int
    on_gpu: int = 0
    staging: int = 0

    @property
    def fixed(self) -> int:
        """What has to be in memory whatever happens to the experts."""
        return self.dense + self.kv + self.scratch + self.staging + RUNTIME

    @property
    def hosted(self) -> int:
        """Experts that no GPU holds."""
        return self.experts - self.on_gpu

    def beside_gpu(self, on_gpu: int, staging: int) -> "Demand":
        """What is left for main memory. The other weights stay there too: they are read from there
        again when a smaller plan for the GPU is made."""
        return replace(self, kv=0, on_gpu=min(on_gpu, self.experts), staging=staging)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """streams: experts come from disk, through an arena of arena_bytes."""

    demand: Demand
    room: Room
    streams: bool
    arena_bytes: int

    def line(self) -> str:
        d = self.demand
        text = f"{show_size(self.room.nbytes)} ({self.room.source}): "
        if not self.streams:
            return text + f"the model's {show_size(d.hosted + d.dense)} fit"
        on_gpu = f"{show_size(d.on_gpu)} on the GPU, " if d.on_gpu else ""
        return text + (
            f"{show_size(self.arena_bytes)} of {show_size(d.experts)} of experts in memory, "
            f"{on_gpu}the others on disk"
        )


def is_expert(name: str) -> bool:
    return EXPERT.fullmatch(name) is not None


def demand_of(tensors: dict[str, Tensor], config: ModelConfig, n_ctx: int, n_seq: int, n_batch: int,
              kv_type: str) -> Demand:
    """What a model with these tensors needs. n_ctx: of the KV cache, as it will be made."""
    experts = sum(t.nbytes for name, t in tensors.items() if is_expert(name))
    dense = sum(t.nbytes for t in tensors.values()) - experts
    if config.kv_rank:  # upper bound: the form with expanded heads, which old files need
        heads, widths = config.n_head, (config.k_size_mla or config.k_size) + config.v_size
    else:
        heads, widths = config.n_head_kv, config.k_size + config.v_size
    kv = int(config.n_layer * n_seq * n_ctx * heads * widths * KV_BYTES[kv_type])
    e = config.experts
    row = 8 * config.n_embd + 2 * config.n_head * (config.k_size + config.v_size)
    row += e.n_used * (3 * e.n_ff + config.n_embd) + 3 * config.n_ff + e.n_expert
    logits = config.n_vocab * max(n_seq, 1)
    return Demand(experts, dense, kv, 4 * (n_batch * row + logits))


def plan_memory(demand: Demand, room: Room, least_arena: int) -> MemoryPlan:
    """Everything in memory if it fits, else the largest arena that does.

    room: what can still be taken. least_arena: the smallest that a layer can work with. Mapped
    weights can be dropped and read again, so they may take all of a limit that is ours alone.
    Raises MemoryBudgetError, with the smallest budget that works.
    """
    spare = SPARE if room.source == MACHINE else SPARE_OWN
    usable = int(room.nbytes * (1 - spare))
    mapped = usable if room.source == MACHINE else room.nbytes
    if demand.hosted + demand.fixed <= mapped:
        return MemoryPlan(demand, room, False, 0)
    if demand.hosted == 0:
        raise _too_little(demand, room, demand.fixed, spare)
    arena = usable - demand.fixed
    if arena < least_arena:
        raise _too_little(demand, room, demand.fixed + least_arena, spare)
    return MemoryPlan(demand, room, True, min(arena, demand.hosted + (demand.hosted >> 6)))


def _too_little(demand: Demand, room: Room, needed: int, spare: float) -> MemoryBudgetError:
    smallest = -(-(int(needed / (1 - spare)) + room.taken) // (1 << 20)) + 1
    kv = f"the KV cache {show_size(demand.kv)}, " if demand.kv else ""
    staging = f"copies to the GPU {show_size(demand.staging)}, " if demand.staging else ""
    return MemoryBudgetError(
        f"{show_size(room.nbytes)} of memory ({room.source}) is too little: weights other than "
        f"experts take {show_size(demand.dense)}, {kv}one step "
        f"{show_size(demand.scratch)}, {staging}the program {show_size(RUNTIME)}; "
        f"{smallest}M would work"
    )
