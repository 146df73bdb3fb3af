"""What a model that streams from disk will do: the speed of the disk, hits, tokens per second."""

import time
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numba import njit

from dali_gguf.offload.budget import show_size
from dali_gguf.offload.direct_io import Memory, ModelFile, page_span
from dali_gguf.offload.memory_plan import MemoryPlan, is_expert
from dali_gguf.offload.read_queue import Read, ReadQueue
from dali_gguf.offload.slot_pool import HALF_LIFE, SlotPool
from dali_gguf.tensor import Tensor

RANGE = 1 << 20  # about one matrix of an expert
POLICIES = ("decayed", "lru", "lfu", "static", "belady")


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """bandwidth: bytes/s of direct reads. hit_rate and how it was found. compute_seconds: of one
    token with everything in memory, None if it is not known."""

    plan: MemoryPlan
    bandwidth: float
    hit_rate: float
    hit_source: str
    expert_bytes_per_token: int
    compute_seconds: float | None = None

    @property
    def miss_bytes(self) -> float:
        """Read from disk for each token."""
        return self.expert_bytes_per_token * (1 - self.hit_rate)

    @property
    def rate(self) -> float:
        """Tokens per second: disk and compute run side by side, so the slower one decides."""
        return 1 / max(self.miss_bytes / self.bandwidth, self.compute_seconds or 0.0)

    def lines(self) -> list[str]:
        compute = "" if self.compute_seconds is not None else " if compute keeps up"
        return [
            f"experts in memory: {show_size(self.plan.arena_bytes + self.plan.demand.on_gpu)} of "
            f"{show_size(self.plan.demand.experts)}, the others on disk",
            f"disk: {self.bandwidth / 1e9:.2f} GB/s measured (direct reads, 4 threads)",
            f"hits: {100 * self.hit_rate:.0f}% ({self.hit_source}), so "
            f"{self.miss_bytes / 1e6:.0f} of {self.expert_bytes_per_token / 1e6:.0f} MB/token "
            f"are read",
            f"decode: {self.rate:.1f} tokens/s predicted{compute}",
        ]


def forecast(plan: MemoryPlan, tensors: dict[str, Tensor], n_expert: int, n_used: int,
             counts: np.ndarray | None = None, ids: np.ndarray | None = None,
             compute_seconds: float | None = None, bandwidth: float | None = None) -> DiskForecast:
    """For a plan that streams. counts [L, E]: stored workloads; ids [T, L, A]: a routing trace (the
    better source); neither: uniform routing, the worst case. bandwidth None: measured now."""
    total = sum(t.nbytes for name, t in tensors.items() if is_expert(name))
    held = min(1.0, (plan.arena_bytes + plan.demand.on_gpu) / max(total, 1))
    if ids is not None:
        capacity = int(held * ids.shape[1] * n_expert)
        rate, source = pool_hits(ids, n_expert, capacity)["decayed"], "replayed trace"
    elif counts is not None:
        rate, source = static_hits(counts, held), "the most used by stored counts"
    else:
        rate, source = held, "uniform routing assumed, the worst case"
    return DiskForecast(plan, bandwidth or measure_bandwidth(tensors), rate, source,
                        total * n_used // n_expert, compute_seconds)


def static_hits(counts: np.ndarray, held: float) -> float:
    """Share of counts [L, E] that the most used part `held` of all experts covers."""
    share = np.sort((counts / np.maximum(counts.sum(1, keepdims=True), 1)).ravel())[::-1]
    return float(share[: int(held * share.size)].sum() / max(share.sum(), 1e-9))


def measure_bandwidth(tensors: dict[str, Tensor], seconds: float = 0.5, seed: int = 0) -> float:
    """Bytes/s of random whole ranges of the experts, read as the arena reads them."""
    experts = [t for name, t in tensors.items() if is_expert(name)]
    files = {path: ModelFile(path) for path in {t.file for t in experts}}
    rng, depth = np.random.default_rng(seed), 12
    memory = Memory(depth * (RANGE + 8192))
    ended: SimpleQueue[Read] = SimpleQueue()
    queue = ReadQueue(ended.put)

    def one(place: int) -> Read:
        t = experts[int(rng.integers(len(experts)))]
        size = min(RANGE, t.nbytes)
        offset = t.offset + int(rng.integers(t.nbytes - size + 1))
        view = memory.view[place : place + page_span(offset, size)]
        return Read(files[t.file], offset, size, view, t.name, place)

    start = time.perf_counter()
    queue.demand([one(i * (RANGE + 8192)) for i in range(depth)])
    while time.perf_counter() - start < seconds:
        read = ended.get()
        if read.error is not None:
            queue.close()
            raise read.error
        queue.demand([one(read.owner)])
    speed = queue.bytes_read / (time.perf_counter() - start)
    queue.close()
    for file in files.values():
        file.close()
    return speed


def pool_hits(ids: np.ndarray, n_expert: int, capacity: int,
              learn: float = 0.4) -> dict[str, float]:
    """Hit rate of one pool of slots over all layers, by policy, for a trace ids int [T, L, A].

    The first part `learn` of the trace only fills the pool (static: chooses its experts by it).
    lru and lfu are the decayed score with a very short and a very long half-life.
    """
    n_token, n_layer, _ = ids.shape
    keys = np.ascontiguousarray(ids + n_expert * np.arange(n_layer)[None, :, None], np.int64)
    start, hits = int(learn * n_token), {}
    for name, half_life in (("decayed", HALF_LIFE), ("lru", 0.25), ("lfu", 1e6)):
        hits[name] = _replay(SlotPool(n_layer, n_expert, capacity, half_life), keys, start)
    counts = np.bincount(keys[:start].ravel(), minlength=n_layer * n_expert)
    kept = np.argsort(-counts, kind="stable")[:capacity]
    hits["static"] = float(np.isin(keys[start:], kept).mean())
    hits["belady"] = _belady(keys.reshape(-1), n_layer * n_expert, capacity, start * keys[0].size)
    return hits


def _replay(pool: SlotPool, keys: np.ndarray, start: int) -> float:
    hits = 0
    for t, step in enumerate(keys):
        pool.tick()
        for layer, ones in enumerate(step):
            missing = ones[pool.resident[ones] == 0]
            pool.touch(0, ones, np.ones(len(ones), np.int64))
            pool.protect(ones)
            short = len(missing) - pool.free
            if short > 0:
                pool.evict(pool.victims(short))
            pool.insert(missing)
            pool.release(ones)
            hits += (len(ones) - len(missing)) * (t >= start)
    return hits / keys[start:].size


@njit(cache=True, nogil=True)
def _belady(uses, n_keys, capacity, start):
    """Hits of uses int64 [N] from start on, if the expert whose next use is farthest always
    goes."""
    never = len(uses) + 1
    following = np.empty(len(uses), np.int64)
    upcoming = np.full(n_keys, never)
    for i in range(len(uses) - 1, -1, -1):
        following[i] = upcoming[uses[i]]
        upcoming[uses[i]] = i
    next_use = np.full(n_keys, -1, np.int64)  # of residents; -1: absent
    held, hits = 0, 0
    for i in range(len(uses)):
        key = uses[i]
        if next_use[key] >= 0:
            hits += i >= start
        elif held < capacity:
            held += 1
        else:
            far = np.argmax(next_use)
            if next_use[far] <= following[i]:
                continue
            next_use[far] = -1
        next_use[key] = following[i]
    return hits / max(1, len(uses) - start)
