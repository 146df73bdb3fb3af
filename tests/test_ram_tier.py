"""Experts in three places: GPU slots, the arena in RAM, disk. A GPU beside too little RAM."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.engine import Engine  # noqa: E402
from dali_gguf.errors import MemoryBudgetError  # noqa: E402
from dali_gguf.gguf_file import GGUFFile  # noqa: E402
from dali_gguf.models import load_model, read_config  # noqa: E402
from dali_gguf.offload import budget, disk_tier, gpu_measure, native_loads, vram  # noqa: E402
from dali_gguf.offload.cost import CostModel  # noqa: E402
from dali_gguf.offload.memory_plan import SPARE  # noqa: E402
from dali_gguf.offload.ram_tier import RamTier  # noqa: E402
from dali_gguf.sampler import SamplingParams  # noqa: E402
from tests.benchmarks import disk_model  # noqa: E402
from tests.benchmarks.disk_model import TINY, Routing, write_model  # noqa: E402

GREEDY = SamplingParams(temperature=0, max_tokens=-2)
PROMPT = [300, 301, 17, 350, 400]
SIZES = dict(n_ctx=128, n_batch=64, threads=1)


@pytest.fixture(autouse=True)
def made_up_costs(monkeypatch):
    """Costs at which both sides are used, also for experts on disk."""
    costs = lambda *_: CostModel(  # noqa: E731
        [1, 2, 4], [90, 120, 180], [40, 45, 50], copy_us=60, r=0.8, t_disk=20
    )
    monkeypatch.setattr(gpu_measure, "measure", costs)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("three") / "model.gguf"
    write_model(path, TINY, Routing())
    return path


@pytest.fixture(scope="module")
def expected(path):
    with Engine(path, **SIZES) as engine:
        assert not engine.memory.streams
        return tokens(engine)


def tokens(engine, n=48):
    return list(islice(engine.tokens(PROMPT, GREEDY), n))


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """A model in which one wrong expert shows in the logits."""
    path = tmp_path_factory.mktemp("strong") / "model.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_model, "EXPERT_SPREAD", 0.1)
        write_model(path, TINY, Routing())
    return path


def slots_hold_the_file(engine):
    """Every resident's bytes on the device are those of the file."""
    slots, checked = engine.scheduler.traffic.slots, 0
    for row, expert in np.argwhere(slots.place >= 0).tolist():
        experts = engine.scheduler.experts[engine.scheduler.layers[row]]
        held = slots.parts(row, int(slots.place[row, expert]))
        for part, tensor in zip(held, experts.matrices(expert)):
            with open(tensor.file, "rb") as file:
                file.seek(tensor.offset)
                assert part.numpy().tobytes() == file.read(tensor.nbytes)
                checked += 1
    assert checked > 0


def room_on_the_card(path, part, n_batch):
    """--vram for that part of the experts, spare slots included."""
    with GGUFFile.open(path) as file:
        plan = vram.plan_model(file.tensors, read_config(file), 1 << 40, 128, 1, n_batch, "f16")
    return plan.dense + plan.kv + plan.scratch + int(part * plan.wanted)


def limited(path, monkeypatch, on_gpu=0.4, in_ram=0.45, steady=True, **options):
    """An engine on cpu-torch with room for these parts of the experts. steady: how long things take
    changes nothing."""
    options = SIZES | options
    vram = room_on_the_card(path, on_gpu, options["n_batch"])
    plan_model = disk_tier.plan_model

    def plan(file, config, room, *rest):
        demand = plan_model(file, config, budget.Room(1 << 40, budget.MACHINE), *rest).demand
        usable = demand.fixed + int(in_ram * demand.experts)
        room = budget.Room(int(usable / (1 - SPARE)) + 1, budget.MACHINE)
        return plan_model(file, config, room, *rest)

    monkeypatch.setattr(disk_tier, "plan_model", plan)
    if in_ram:
        monkeypatch.setattr("dali_gguf.models.load_model", load_without_bytes)
    engine = Engine(path, device="cpu-torch", vram=vram, **options)
    if steady:
        engine.scheduler.model.observe = lambda *_: None
        engine.scheduler.step.choices = replace(engine.scheduler.choices, adapt=False)
    return engine


def load_without_bytes(file, config, device):
    """The model, but who looks at the mapped bytes of an expert gets wrong ones."""
    model = load_model(file, config, device)
    for experts in model.experts.values():
        for tensor in (*experts.gate, *experts.up, *experts.down):
            object.__setattr__(tensor, "data", np.full(tensor.nbytes, 77, np.uint8))
    return model


POLICIES = [
    {}, {"placement": "greedy"}, {"placement": "optimal", "prefetch": "none"},
    {"placement": "balance", "expert_cache": "lru"},
]  # fmt: skip


@pytest.mark.parametrize("policies", POLICIES, ids=lambda p: "-".join(p.values()) or "default")
def test_the_same_tokens_from_three_places(path, monkeypatch, expected, policies):
    with limited(path, monkeypatch, **policies) as engine:
        assert engine.memory.streams and isinstance(engine.scheduler.ram, RamTier)
        assert tokens(engine) == expected
        total = engine.scheduler.counters.total
        assert total("hits") > 0 and total("from_ram") > 0
        assert total("from_disk") > 0, "no copy came from disk: the limit did not bind"
        arena = engine.scheduler.disk_stats()
        assert arena.hits + arena.misses + arena.late == arena.uses
        assert arena.uses == total("on_cpu") and (arena.misses > 0 or "placement" in policies)
        assert arena.arena_bytes <= engine.memory.arena_bytes
        assert "from disk" in engine.scheduler.line() and "disk:" in engine.stats.line()
        assert "from RAM/disk" in engine.scheduler.table()
        slots_hold_the_file(engine)


@pytest.mark.parametrize("n_batch", [1, 8, 40])
@pytest.mark.parametrize("in_ram", [0.3, 0.5])
@pytest.mark.parametrize("placement", ["threshold", "greedy"])
def test_the_same_logits_from_three_places(strong, monkeypatch, n_batch, in_ram, placement):
    ids = np.random.default_rng(0).integers(3, TINY.n_vocab, 100).tolist()
    with Engine(strong, **SIZES) as engine:
        expected = engine.logits(ids)
    options = dict(n_batch=n_batch, placement=placement)
    with limited(strong, monkeypatch, in_ram=in_ram, **options) as engine:
        logits = engine.logits(ids)
        total = engine.scheduler.counters.total
        assert total("from_disk") > 0 and engine.scheduler.disk_stats().misses > 0
        slots_hold_the_file(engine)
    assert np.abs(logits - expected).max() < 0.03 * np.abs(expected).max()


def test_python_readers_do_the_same(path, monkeypatch, expected):
    monkeypatch.setattr(native_loads, "NATIVE", False)
    with limited(path, monkeypatch) as engine:
        assert tokens(engine) == expected
        assert engine.scheduler.counters.total("from_disk") > 0


def test_experts_on_the_cpu_only_come_through_the_arena(path, monkeypatch, expected):
    with limited(path, monkeypatch, placement="static-hot") as engine:
        assert tokens(engine) == expected
        total = engine.scheduler.counters.total
        assert total("copied") == 0 and engine.scheduler.disk_stats().misses > 0


def test_verify_reads_what_it_compares(path, monkeypatch, expected):
    with limited(path, monkeypatch, verify=True) as engine:
        assert tokens(engine, 12) == expected[:12]
        assert not engine.scheduler.verifier.failed
        assert engine.scheduler.counters.total("from_disk") > 0


def test_guesses_and_fills_come_from_ram(path, monkeypatch, expected):
    with limited(path, monkeypatch, in_ram=0.3) as engine:
        scheduler = engine.scheduler
        scheduler.gap.us[False] = 1e6
        started, start = [], scheduler.traffic._start

        def note(row, experts, kind, leave):
            started.extend((kind, scheduler.ram.holds(row)[e]) for e in experts)
            return start(row, experts, kind, leave)

        monkeypatch.setattr(scheduler.traffic, "_start", note)
        assert tokens(engine) == expected
        assert {True} == {in_ram for kind, in_ram in started if kind != "demand"}
        assert False in {in_ram for kind, in_ram in started if kind == "demand"}


def test_an_expert_that_leaves_the_arena_while_it_is_copied_is_read_again(
    path, monkeypatch, expected
):
    with limited(path, monkeypatch, in_ram=0.5) as engine:
        link, ram = engine.scheduler.traffic.link, engine.scheduler.ram
        plain, lost = link._copy, []

        def copy(one):
            plain(one)
            if not one.from_disk and len(lost) < 20:  # other bytes came, and the slot changed hands
                lost.append(one)
                for _, target in one.parts:
                    target[:] = 255
                ram.arena.evicted[one.key] += 1

        link._copy = copy
        assert tokens(engine) == expected
        assert lost and all(one.from_disk for one in lost)


@pytest.mark.parametrize("at", [9, 150], ids=["prefill", "decode"])
def test_a_smaller_plan_starts_the_arena_anew(path, monkeypatch, expected, capsys, at):
    with limited(path, monkeypatch) as engine:
        before, real, calls = engine.scheduler, engine.device.compute, []

        def compute(*args):
            calls.append(args)
            if len(calls) == at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(*args)

        monkeypatch.setattr(engine.device, "compute", compute)
        assert tokens(engine) == expected
        assert engine.scheduler is not before and engine.scheduler.ram is not before.ram
        stats = engine.stats.disk  # of both arenas
        assert stats.uses > engine.scheduler.disk_stats().uses or at == 9
        assert all(getattr(stats, name) >= 0 for name in ("uses", "hits", "misses", "bytes_read"))
        assert stats.uses == stats.hits + stats.misses + stats.late
        for memory in (before.ram.arena.slots.memory, before.ram.staging.memory):
            with pytest.raises(ValueError, match="released"):
                memory.view[0]
        assert engine.scheduler.counters.total("from_disk") > 0
    assert "going on with" in capsys.readouterr().err


def test_what_the_gpu_holds_need_not_be_in_ram(path, monkeypatch):
    with limited(path, monkeypatch, on_gpu=1.01, in_ram=0.0) as engine:
        assert not engine.memory.streams and engine.scheduler.ram is None
    with pytest.raises(MemoryBudgetError, match="copies to the GPU 8M.* would work"):
        limited(path, monkeypatch, on_gpu=0.4, in_ram=0.01)


def test_the_disk_is_measured_and_corrected(path, monkeypatch):
    costs = CostModel([1, 2, 4], [900, 1200, 1800], [40, 45, 50], copy_us=60)
    monkeypatch.setattr(gpu_measure, "measure", lambda *_: costs)
    monkeypatch.setattr("dali_gguf.offload.disk_forecast.measure_bandwidth", lambda _: 1e3)
    with limited(path, monkeypatch, steady=False) as engine:
        started = engine.scheduler.model.t_disk
        assert started == pytest.approx(1e3 * engine.model.experts[0].expert_bytes())
        tokens(engine)
        assert engine.scheduler.model.t_disk < 0.5 * started
