"""CPU and stand-in GPU together give what one device gives, wherever the experts are."""

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.offload.cache import ExpertCache, settings  # noqa: E402
from dali_gguf.offload.cost import CostModel  # noqa: E402
from dali_gguf.offload.gpu_slots import GpuSlots  # noqa: E402
from dali_gguf.offload.hybrid_scheduler import Choices, HybridScheduler  # noqa: E402
from dali_gguf.offload.placement import POLICIES, resident_hot  # noqa: E402
from dali_gguf.offload.prefetch import Predictor, RouterMap  # noqa: E402
from dali_gguf.offload.seating import fill_all  # noqa: E402
from dali_gguf.offload.torch_device import TorchDevice  # noqa: E402
from dali_gguf.router import RouterRule  # noqa: E402
from tests.hybrid_parts import D, NumpyCpu, layers_of, router_weights, routing_for  # noqa: E402

torch.set_num_threads(1)  # small products: threads only wait for each other
LAYERS, ROUTERS = layers_of(), router_weights()
N_LAYER, N_EXPERT = 3, 8


def test_released_slots_give_their_memory_back_though_views_are_alive():
    layouts = [TorchDevice(torch.device("cpu")).experts(LAYERS[i]).layout for i in LAYERS]
    slots = GpuSlots(torch.device("cpu"), layouts, N_EXPERT, np.ones(N_LAYER, np.int64), 2)
    parts = slots.parts(0, slots.take(0)[0])
    slots.release()
    assert parts[0].untyped_storage().size() == 0


class Rig:
    """A scheduler over three layers; `per` residents a layer, `spare` slots of each size."""

    def __init__(self, per=3, spare=3, costs=None, **choices):
        self.device = TorchDevice(torch.device("cpu"))
        self.choices = Choices(**{"adapt": False, "prefetch": "residual", **choices})
        resident = resident_hot(np.zeros((N_LAYER, N_EXPERT)), per * N_LAYER)
        layouts = [self.device.experts(LAYERS[i]).layout for i in LAYERS]
        slots = GpuSlots(self.device.device, layouts, N_EXPERT, resident.sum(1), spare)
        cache = ExpertCache(resident, settings(self.choices.expert_cache))
        maps = {i: RouterMap(w, 2) for i, w in ROUTERS.items()}
        predictor = (
            None if self.choices.prefetch == "none" else Predictor(self.choices.prefetch, maps)
        )
        costs = costs or CostModel(
            [1, 2, 4], [30, 60, 120], [10, 12, 15], copy_us=10, r=0.8, max_tokens=64
        )
        routers = {i: (None, RouterRule(normalize=True)) for i in LAYERS}
        self.cpu = NumpyCpu()
        self.scheduler = HybridScheduler(
            self.device, self.cpu, LAYERS, routers, slots, cache, predictor, costs, self.choices
        )
        fill_all(self.scheduler.traffic, resident)

    def run(self, steps=20, tokens=1, seed=0):
        """A residual stream through the three layers; largest error relative to one device."""
        rng, worst = np.random.default_rng(seed), 0.0
        for _ in range(steps):
            h = rng.normal(size=(tokens, D)).astype(np.float32)
            for layer in LAYERS:
                routing = routing_for(h, ROUTERS[layer])
                y = self.scheduler.moe(layer, torch.from_numpy(h), routing).numpy()
                exact = self.cpu.moe(h, routing, LAYERS[layer])
                worst = max(worst, float(np.abs(y - exact).max() / np.abs(exact).max()))
                h = h + 0.3 * exact / np.abs(exact).max()
        return worst

    def total(self, name):
        return self.scheduler.counters.total(name)

    def check(self):
        """What always holds: hits + misses = uses; every slot is in one place only."""
        c, traffic = self.scheduler.counters.figures, self.scheduler.traffic
        for copy in [c for coming in traffic.coming for c in coming.values()] + traffic._orphans:
            copy.issued.wait()
        traffic.settle()
        names = {n: c[i] for i, n in enumerate(self.scheduler.counters.as_dict()["total"])}
        assert np.array_equal(names["hits"] + names["misses"], names["uses"])
        assert np.array_equal(names["on_cpu"] + names["on_gpu"] + names["copied"], names["uses"])
        assert (names["useful"] + names["late"] + names["wasted"] <= names["prefetched"]).all()
        assert np.array_equal(traffic.slots.place >= 0, traffic.cache.resident.astype(bool))
        in_use = sorted(traffic.slots.place[traffic.slots.place >= 0].tolist())
        free = sorted(at for q in traffic.slots.free.values() for at, _ in q)
        coming = sorted(copy.offset for rows in traffic.coming for copy in rows.values())
        everything = sorted(in_use + free + coming)
        assert len(set(everything)) == len(everything) == self.n_slots()
        for row, layer in enumerate(LAYERS):
            for e in np.flatnonzero(traffic.cache.resident[row]).tolist():
                parts = traffic.slots.parts(row, int(traffic.slots.place[row, e]))
                for held, tensor in zip(parts, LAYERS[layer].matrices(e)):
                    assert np.array_equal(held.numpy(), tensor.data)

    def n_slots(self):
        sizes = [lay.nbytes for lay in self.scheduler.traffic.slots.layouts]
        spare = self.spare * len(set(sizes))
        return int(self.scheduler.cache.resident.sum()) + spare

    spare = 3


@pytest.fixture
def rig():
    made = []

    def make(**options):
        made.append(Rig(**options))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.close()


@pytest.mark.parametrize("placement", POLICIES)
def test_every_placement_gives_the_same(rig, placement):
    r = rig(placement=placement)
    assert r.run(8) < 1e-4
    assert r.run(3, tokens=5) < 1e-4
    r.check()
    assert (r.total("on_cpu") == 0) == (placement == "all-gpu")
    if placement in ("all-cpu", "static-hot", "static-layers"):
        assert r.total("copied") == 0


@pytest.mark.parametrize("cache", ["decayed", "workload", "lru", "lfu", "lfru", "static"])
@pytest.mark.parametrize("prefetch", ["residual", "next-router", "none"])
def test_caches_and_guesses(rig, cache, prefetch):
    r = rig(expert_cache=cache, prefetch=prefetch)
    r.scheduler.gap.us[False] = 1000.0
    assert r.run(25) < 1e-4
    r.check()
    assert (r.total("prefetched") > 0) == (prefetch != "none")
    if cache == "static":
        assert r.total("adopted") == r.total("fills") == 0
        assert "never acted" in r.scheduler.line()
    elif cache in ("lru", "decayed"):
        assert r.total("adopted") + r.total("fills") > 0


def test_the_cpu_part_in_the_calling_thread(rig):
    """As on a GPU, whose launches return at once: a thread only where copies are waited for."""
    r = rig()
    r.scheduler.launches = True
    calls = {"run": 0, "start": 0}
    for name in calls:

        def counted(*args, name=name, real=getattr(r.scheduler.cpu, name)):
            calls[name] += 1
            return real(*args)

        setattr(r.scheduler.cpu, name, counted)
    assert r.run(20) < 1e-4
    assert r.run(3, tokens=5) < 1e-4
    r.check()
    assert calls["run"] > 0 and calls["start"] > 0


def test_prefill_streams_more_experts_than_there_are_spare_slots(rig):
    r = rig(placement="all-gpu", per=1)
    assert r.run(2, tokens=40) < 1e-4
    assert r.total("copied") > 30 and r.total("on_cpu") == 0
    r.check()
    assert r.scheduler.cache.frozen


def test_no_slots_at_all_runs_on_the_cpu(rig):
    r = rig(per=0, spare=0)
    r.spare = 0
    assert r.run(3) < 1e-4
    assert r.total("on_gpu") == r.total("copied") == r.total("hits") == 0
    r.check()


def test_everything_resident_moves_nothing(rig):
    r = rig(per=N_EXPERT, spare=0, placement="static-hot")
    r.spare = 0
    assert r.run(3) < 1e-4
    assert r.total("misses") == r.total("bytes") == r.total("on_cpu") == 0
    r.check()


def test_verify_reports_the_difference_and_catches_a_corrupted_slot(rig):
    r = rig(verify=True, placement="static-hot", expert_cache="static")
    r.run(4)
    verifier = r.scheduler.verifier
    assert not verifier.failed and 0 < verifier.largest < 1e-4
    assert "slots as in the file" in r.scheduler.line()
    place = int(r.scheduler.traffic.slots.place[1, 0])
    r.scheduler.traffic.slots.memory[place + 1] ^= 4
    r.run(12)
    assert verifier.failed and verifier.damaged == {(2, 0)}
    assert "DAMAGED" in r.scheduler.line()


def test_a_failed_copy_is_raised_where_it_is_needed(rig):
    r = rig(placement="all-gpu", prefetch="none")

    def fail(copy):
        raise OSError("link down")

    r.scheduler.traffic.link._copy = fail
    with pytest.raises(OSError, match="link down"):
        r.run(2)


def test_a_late_guess_whose_slot_is_needed_at_once(rig):
    """More copies than slots: the slot of a guess serves again in the same step, once."""
    r = rig(placement="all-gpu", expert_cache="static")
    r.scheduler.gap.room = lambda *_: 100
    plain = r.scheduler.traffic.link._copy

    def slow(copy):
        time.sleep(0.002)
        plain(copy)

    r.scheduler.traffic.link._copy = slow
    assert r.run(12, tokens=6) < 1e-4
    assert r.total("late") > 0 and r.total("copied") > 0
    r.check()


def test_only_what_pays_is_kept(rig):
    """A link so slow that copies never pay off: after its trial the scheduler stops copying."""
    r = rig(adapt=True, placement="balance", prefetch="none", expert_cache="static")
    assert set(r.scheduler.pays.on) == {"copies"}
    plain = r.scheduler.traffic.link._copy

    def slow(copy):
        time.sleep(0.003)
        plain(copy)

    r.scheduler.traffic.link._copy = slow
    assert r.run(40) < 1e-4
    assert r.scheduler.pays.on == {"copies": False} and "off copies" in r.scheduler.line()
    before = r.total("copied")
    r.run(5, seed=1)
    assert r.total("copied") == before
    r.check()


def test_all_gpu_copies_its_misses_whatever_is_adapted(rig):
    r = rig(adapt=True, placement="all-gpu", expert_cache="static")
    assert r.run(8) < 1e-4
    assert r.total("on_cpu") == 0 and r.total("copied") > 0
    r.check()


def test_costs_learn_from_the_steps(rig):
    r = rig()
    r.run(20)
    assert r.scheduler.model.observed > 5
