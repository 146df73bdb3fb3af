"""Decides where a model's weights are kept, before it is loaded: mapped, or streamed from disk."""

import re
import threading

import numpy as np

from dali_gguf.config import ModelConfig
from dali_gguf.device import Device
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.offload import budget
from dali_gguf.offload.arena import ExpertArena
from dali_gguf.offload.budget import Room
from dali_gguf.offload.bus_guard import BusGuard
from dali_gguf.offload.direct_io import PAGE, ModelFile
from dali_gguf.offload.disk_scheduler import DiskScheduler
from dali_gguf.offload.look_ahead import DEPTH
from dali_gguf.offload.memory_watch import GROWTH, MemoryWatch
from dali_gguf.offload.memory_plan import MemoryPlan, demand_of, is_expert, plan_memory
from dali_gguf.offload.resident import ResidentWeights
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.slots import check_arena, smallest_arena
from dali_gguf.offload.staging import staging_bytes
from dali_gguf.offload.vram import VramPlan
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor


def room_for(ram: int | str | None) -> Room:
    """What may be taken from now on. ram: the whole process's budget (bytes, or text like "6G");
    None: what the machine and its memory groups leave. The lesser of both counts."""
    free = budget.available()
    if ram is None:
        return free
    nbytes = budget.parse_size(ram) if isinstance(ram, str) else ram
    taken = budget.resident()
    asked = Room(max(0, nbytes - taken), f"--ram {budget.show_size(nbytes)}", taken)
    return min(asked, free, key=lambda room: room.nbytes)


def plan_model(file: GGUFFile, config: ModelConfig, room: Room, n_ctx: int, n_seq: int = 1,
               n_batch: int = 512, kv_type: str = "f16", gpu: VramPlan | None = None) -> MemoryPlan:
    """gpu: what lies in GPU memory and so need not be in main memory. Raises MemoryBudgetError,
    with the smallest budget that works."""
    demand = demand_of(file.tensors, config, n_ctx, n_seq, n_batch, kv_type)
    sizes = expert_sizes(file.tensors, config.experts.n_expert)
    if gpu is not None:
        held = demand.experts * gpu.resident_bytes // max(gpu.wanted, 1)
        demand = demand.beside_gpu(held, staging_bytes(int(sizes.max(initial=0))))
    least = 0
    if len(sizes):
        per_layer = min(config.experts.n_used * (1 + DEPTH), config.experts.n_expert)
        least = smallest_arena(sizes, config.experts.n_expert, per_layer)
    return plan_memory(demand, room, least)


def expert_sizes(tensors: dict[str, Tensor], n_expert: int) -> np.ndarray:
    """int64 [rows]: about the slot size of one expert in each layer that has experts, ascending."""
    layers: dict[str, int] = {}
    for name, t in tensors.items():
        if is_expert(name):
            layer = re.match(r"blk\.\d+", name)[0]
            layers[layer] = layers.get(layer, 0) + t.nbytes
    return np.sort([total // n_expert + 6 * PAGE for total in layers.values()])


class Placement:
    """Gets the weights that do not stream to where they stay: mapped and asked for, read into
    memory (mmap False), or, if the experts stream, all others in memory of our own.

    file: the file to use. Its bytes may be looked at after wait().
    """

    def __init__(self, plan: MemoryPlan, file: GGUFFile, mmap: bool = True):
        self.file, self._resident = file, None
        if plan.streams:
            dense = {name: t for name, t in file.tensors.items() if not is_expert(name)}
            self._resident = ResidentWeights(dense)
            file.tensors.update(self._resident.tensors)
        elif mmap:
            read_ahead(file)
        else:
            file.close()
            self.file = GGUFFile.open(file.paths[0], mmap=False)

    def wait(self) -> None:
        """Raises ModelFileError if they cannot be read."""
        if self._resident is not None:
            self._resident.wait()

    def close(self) -> None:
        """Ends the reading if it was never waited for."""
        if self._resident is not None:
            self._resident.close()


def guard(plan: MemoryPlan, file: GGUFFile, mmap: bool = True) -> BusGuard:
    """Over the mapped weights. When experts stream, or mmap is False, no step touches mapped
    bytes."""
    return BusGuard(file.tensors if mmap and not plan.streams else {})


def make_scheduler(plan: MemoryPlan, device: Device, experts: dict[int, LayerExperts],
                   routers: dict[int, tuple], config: ModelConfig, file: GGUFFile | None = None,
                   prefetch: bool = True, ram: int | str | None = None) -> Scheduler:
    """The scheduler that the plan calls for. file: of the model, to keep counts beside it; what
    earlier runs used most is read first, in the time that the disk has left. ram: the budget."""
    if not plan.streams:
        return Scheduler(device, experts, routers)
    n_used = config.experts.n_used
    arena = ExpertArena(experts, plan.arena_bytes, growth=GROWTH)
    try:
        check_arena(arena.row_sizes, arena.n_expert, n_used, arena.slots.nbytes)
        counts = None
        if file is not None:
            counts = RunCounts(file.paths[0], file, sorted(experts), n_used)
        watch = MemoryWatch(arena, plan.arena_bytes, lambda: room_for(ram))
        return DiskScheduler(
            device, experts, routers, arena, n_used, config.n_embd, prefetch, counts, watch
        )
    except BaseException:
        arena.close()
        raise


def read_ahead(file: GGUFFile) -> threading.Thread:
    """The mapped way's one pass: asks for the whole file, in the background, in the file's
    order."""

    def ask():
        for path in file.paths:
            one = ModelFile(path, direct=False)
            one.read_ahead()
            one.close()

    thread = threading.Thread(target=ask, name="read-ahead", daemon=True)
    thread.start()
    return thread
