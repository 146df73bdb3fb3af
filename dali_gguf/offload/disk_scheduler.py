"""Experts come from disk through an arena; those in memory are computed while the others arrive."""

import time
from collections.abc import Iterator

import numpy as np

from dali_gguf.closing import close_all
from dali_gguf.device import Array, Device
from dali_gguf.offload.arena import ExpertArena
from dali_gguf.offload.arena_stats import ArenaStats
from dali_gguf.offload.look_ahead import LookAhead
from dali_gguf.offload.memory_watch import MemoryWatch
from dali_gguf.offload.pays import Pays
from dali_gguf.offload.run_counts import RunCounts
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.slots import RING
from dali_gguf.router import Router
from dali_gguf.routing import LayerExperts, Routing

SCAN = 2  # a step of T tokens is a scan (prefill) from T * A >= SCAN * E on
NEARLY_ALL = 0.9
TAUGHT = 32  # tokens of a scan that the look-ahead learns from


class DiskScheduler(Scheduler):
    """prefetch False: never guess. The arena is closed with the scheduler. counts: of this run,
    kept for the next one. watch: of the memory that is left."""

    recordable = False

    def __init__(self, device: Device, experts: dict[int, LayerExperts], routers: dict[int, tuple],
                 arena: ExpertArena, n_used: int, n_embd: int, prefetch: bool = True,
                 counts: RunCounts | None = None, watch: MemoryWatch | None = None):
        super().__init__(device, experts, routers)
        self.arena, self.counts, self.watch, self.n_used = arena, counts, watch, n_used
        self.look_ahead = LookAhead(device, routers, n_used, n_embd)
        if counts is not None and counts.means is not None:
            self.look_ahead.start_from(counts.means)
        self.pays = Pays(("prefetch",) if prefetch else ())
        arena.rest = device.rest
        layers = sorted(experts)
        self._row = {layer: row for row, layer in enumerate(layers)}
        self._first, self._next = layers[0], dict(zip(layers, layers[1:]))
        self._ahead: tuple[Array, ...] | None = None  # of the layer routed last, with later routers
        self._began: float | None = None
        self._filled = counts is not None and counts.counts is not None
        if self._filled:  # what earlier runs used most
            arena.fill(counts.counts, n_used)

    def route(self, layer: int, h: Array, router: Router) -> Routing:
        """As Scheduler.route. The routers that guesses need are in the same launch."""
        self._ahead, scan = None, len(h) * self.n_used >= SCAN * self.arena.n_expert
        if scan or not self.pays.enabled("prefetch"):
            return super().route(layer, h, router)
        logits, *ahead = self.device.matmul(h, router.weight, *self.look_ahead.targets(layer))
        self._ahead = tuple(ahead)
        if router.bias is not None:
            logits = self.device.add(logits, router.bias)
        return self.device.route(logits, router.n_used, router.rule)

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        """As Scheduler.moe: the same bits, whatever was in memory and whatever arrived first."""
        scan = routing.expert_ids.size >= SCAN * len(routing.workload)
        if layer == self._first:
            self._new_step(len(h), scan)
        ids = np.flatnonzero(routing.workload)
        arrivals = self.arena.need(layer, ids, routing.workload[ids], frozen=scan)
        if self.pays.enabled("prefetch"):
            self._guess(layer, h, routing, scan)
        y = self._compute(layer, h, routing, len(ids), arrivals)
        if scan and layer in self._next:
            self._read_on(self._next[layer], len(ids))
        if self.counts is not None:
            self.counts.add(self._row[layer], routing.workload)
        return y

    def _compute(self, layer: int, h: Array, routing: Routing, active: int,
                 arrivals: Iterator[np.ndarray]) -> Array:
        """In one launch if everything is in memory, else as it arrives."""
        experts, addresses = self.experts[layer], self.arena.addresses(layer)
        here = next(arrivals)
        if len(here) == active:
            y = self.device.moe(h, routing, experts, addresses)
            next(arrivals, None)  # they may be evicted from now on
            return y
        step = self.device.moe_begin(h, routing, experts)
        self.device.moe_run(step, here, addresses)
        for here in arrivals:
            self.device.moe_run(step, here, addresses)
        return self.device.moe_end(step)

    def _guess(self, layer: int, h: Array, routing: Routing, scan: bool) -> None:
        """Starts reading what the next layers will probably need; a scan only teaches."""
        if scan:
            h, ids = h[-TAUGHT:], routing.expert_ids[-TAUGHT:]
            self.look_ahead.observe(layer, h, ids)
            self.look_ahead.guess(layer, h)
            return
        self.look_ahead.observe(layer, h, routing.expert_ids)
        for target, ids in self.look_ahead.guess(layer, h, self._ahead):
            self.arena.hint(target, ids)

    def _read_on(self, layer: int, active: int) -> None:
        """A scan that used nearly all experts will do so again: the disk works during attention."""
        if active >= NEARLY_ALL * self.arena.n_expert:
            absent = np.flatnonzero(~self.arena.resident(layer))
            self.arena.hint(layer, absent[:RING], frozen=True)

    def _new_step(self, tokens: int, scan: bool) -> None:
        if self.watch is not None:
            (self.watch.before_scan if scan else self.watch.after_step)()
        now = time.perf_counter()
        if self._began is not None:
            self.pays.record(1e6 * (now - self._began), tokens)
            if not (scan or self._filled):
                self._filled = True
                self.arena.fill()  # any experts, but not while the first token waits for its own
        self._began = now

    def disk_stats(self) -> ArenaStats:
        return self.arena.stats()

    def close(self) -> None:
        close_all(self.arena.close, self._save)

    def _save(self) -> None:
        """What was learned, for later runs."""
        if self.counts is not None:
            self.counts.save(self.look_ahead.means())
