"""--device and --vram from the engine's side: same tokens, plans, fallbacks, one-line errors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.models import read_config  # noqa: E402

from dali_gguf.engine import Engine  # noqa: E402
from dali_gguf.errors import InputError  # noqa: E402
from dali_gguf.gguf_file import GGUFFile  # noqa: E402
from dali_gguf.offload import devices, gpu_measure, gpu_slots, gpu_tier, vram  # noqa: E402
from dali_gguf.offload.cost import CostModel  # noqa: E402
from dali_gguf.offload.hybrid_scheduler import HybridScheduler  # noqa: E402
from dali_gguf.offload.scheduler import Scheduler  # noqa: E402
from dali_gguf.sampler import SamplingParams  # noqa: E402
from tests.small_gguf import EXPERTS, LAYERS, USED, write_small  # noqa: E402
from tests.tiny_models import N_VOCAB  # noqa: E402

SIZES = dict(n_ctx=64, n_batch=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = np.random.default_rng(3).integers(3, N_VOCAB, 20).tolist()


@pytest.fixture(autouse=True)
def made_up_costs(monkeypatch, request):
    """Costs that make the GPU worth using; what torch really takes on a CPU would not."""
    if "measured" in request.keywords:
        return
    costs = [1, 2, 4], [90, 120, 180], [40, 45, 50]
    monkeypatch.setattr(
        gpu_measure, "measure", lambda *_: CostModel(*costs, copy_us=60, r=0.8)
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_small(tmp_path_factory.mktemp("devices") / "small.gguf")


@pytest.fixture(scope="module")
def half(path):
    """--vram with room for half of the experts."""
    file = GGUFFile.open(path)
    plan = vram.plan_model(file.tensors, read_config(file), 1 << 40, 64, 1, 8, "f16")
    file.close()
    return plan.dense + plan.kv + plan.scratch + plan.wanted * 6 // 10


@pytest.fixture(scope="module")
def reference(path):
    """The CPU's greedy tokens and the logits of the prompt."""
    with Engine(path, device="cpu", threads=1, **SIZES) as engine:
        return list(engine.tokens(PROMPT, GREEDY)), engine.logits(PROMPT)


POLICIES = [
    {"placement": "threshold"}, {"placement": "greedy", "prefetch": "next-router"},
    {"placement": "balance", "expert_cache": "lru"}, {"placement": "static-layers"},
    {"placement": "static-hot"}, {"placement": "all-cpu"}, {"placement": "all-gpu"},
    {"placement": "optimal", "expert_cache": "workload", "prefetch": "none"},
]  # fmt: skip


@pytest.mark.parametrize("policies", POLICIES, ids=lambda p: "-".join(p.values()))
def test_the_same_tokens_as_on_the_cpu(path, half, reference, policies):
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES, **policies) as engine:
        assert isinstance(engine.scheduler, HybridScheduler) and engine.device.name == "cpu-torch"
        tokens = list(engine.tokens(PROMPT, GREEDY))
        logits = engine.logits(PROMPT)
        totals = engine.scheduler.figures()["total"]
    largest = np.abs(reference[1]).max()
    assert np.abs(logits - reference[1]).max() < 0.03 * largest
    assert tokens == reference[0]
    assert totals["uses"] == totals["hits"] + totals["misses"] > 0
    assert 0 < totals["hits"] < totals["uses"]


def test_verify_and_the_closing_line(path, half):
    with Engine(path, device="cpu-torch", threads=1, vram=half, verify=True, **SIZES) as engine:
        list(engine.tokens(PROMPT, GREEDY))
        assert not engine.scheduler.verifier.failed
        assert "slots as in the file" in engine.scheduler.line()
        assert f"layer{LAYERS - 1}" not in engine.scheduler.table()
        assert len(engine.scheduler.table().splitlines()) == 1 + LAYERS


def test_all_experts_fit(path):
    with Engine(path, device="cpu-torch", threads=1, **SIZES) as engine:
        list(engine.tokens(PROMPT, GREEDY))
        assert engine.scheduler.counters.total("misses") == 0
        assert engine.scheduler.cache.resident.sum() == LAYERS * EXPERTS


def test_too_little_memory_runs_on_the_cpu(path, reference, capsys):
    with Engine(path, device="cpu-torch", threads=1, vram="1K", **SIZES) as engine:
        assert engine.device.name == "cpu" and type(engine.scheduler) is Scheduler
        assert list(engine.tokens(PROMPT, GREEDY)) == reference[0]
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "too little" in text and "running on the CPU" in text


def test_memory_that_runs_out_makes_a_smaller_plan(path, half, reference, capsys, monkeypatch):
    real, calls = torch.empty, []

    def empty(*args, **options):
        calls.append(args)
        if args and type(args[0]) is int and args[0] > 4000 and options.get("dtype") is torch.uint8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return real(*args, **options)

    monkeypatch.setattr(gpu_slots.torch, "empty", empty)
    small = half  # the slots take more than 4000 bytes
    monkeypatch.setattr(devices.GpuTier, "make_scheduler", _slots_only)
    with pytest.raises(StopIteration):
        Engine(path, device="cpu-torch", threads=1, vram=small, **SIZES)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all("GPU memory ran out: planning with" in line for line in lines)


def test_an_error_that_only_speaks_of_memory_is_not_a_lack_of_it(path, half, capsys, monkeypatch):
    def empty(*args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        monkeypatch.setattr(gpu_slots.torch, "empty", empty)
        tier = engine._tier
        with pytest.raises(RuntimeError, match="illegal"):
            _allocate(tier, engine.model.experts)
    assert "ran out" not in capsys.readouterr().err


def _allocate(tier, experts):
    layouts = [tier.device.experts(e).layout for e in experts.values()]
    plan, device = tier.plan_of, tier.device.device
    gpu_slots.allocate(device, layouts, EXPERTS, plan.slots, plan.spare, gpu_tier.say)


def _slots_only(tier, model, config, file, memory):
    """Only the part that allocates slots, so that nothing else meets the limit."""
    try:
        _allocate(tier, model.experts)
    except torch.OutOfMemoryError:
        pass
    raise StopIteration


def test_no_gpu_says_so_once(path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.find("cuda") is None and devices.find("cuda:1") is None
    monkeypatch.setattr(devices, "gpu_driver", lambda: False)
    assert devices.find("auto") is None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(
        "no GPU" in line and "running on the CPU" in line for line in lines
    )
    assert devices.find("cpu") is None and capsys.readouterr().err == ""


def test_no_torch_says_so_once(capsys, monkeypatch):
    import builtins

    real = builtins.__import__

    def without_torch(name, *rest, **options):
        if name == "torch":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    assert devices.find("cpu-torch") is None
    assert "needs torch, which is not installed" in capsys.readouterr().err


def test_a_card_becomes_the_current_one_or_is_not_there(monkeypatch):
    """Events are recorded, and Triton's kernels launched, on the current device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.find("cuda") == torch.device("cuda", 0)
    assert devices.find("cuda:1") == torch.device("cuda", 1) and chosen == [0, 1]
    with pytest.raises(InputError, match="'cuda:2' is not there; torch sees 2: cuda:0 to cuda:1"):
        devices.find("cuda:2")


def test_gpu_memory_without_a_gpu_is_pointed_out(path, capsys):
    with Engine(path, vram="1G", threads=1, **SIZES) as engine:
        assert engine.device.name == "cpu"
    assert "--vram is for a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "cpu-torch:1", ""])
def test_unknown_devices(spec):
    with pytest.raises(InputError, match="is not known"):
        devices.find(spec)


@pytest.mark.parametrize("size", [0, -1, "0", "-2G", "abc", "", "nan", "1e3", "6 GBs"])
def test_impossible_vram(path, size):
    for device in ("cpu", "cpu-torch"):
        with pytest.raises(InputError, match="is not a size above 0"):
            Engine(path, device=device, vram=size)


def test_vram_larger_than_the_card(path):
    with pytest.raises(InputError, match="--vram 900.0T|--vram 921600.0G"):
        Engine(path, device="cpu-torch", vram="900T")


@pytest.mark.parametrize(
    "option,known",
    [("placement", "threshold, greedy"), ("prefetch", "residual"), ("expert_cache", "decayed")],
)
def test_unknown_policies_are_listed(path, half, option, known):
    with pytest.raises(InputError, match=f"'best' is unknown: choose one of .*{known}"):
        Engine(path, **{option: "best"})
    if option == "prefetch":
        with pytest.raises(InputError, match="'linear' needs a fitted map"):
            Engine(path, device="cpu-torch", vram=half, prefetch="linear", **SIZES)


def test_what_a_run_learned_starts_the_next_one(tmp_path, half):
    path = write_small(tmp_path / "learn.gguf")
    options = dict(device="cpu-torch", threads=1, vram=half, **SIZES)
    with Engine(path, **options) as engine:
        assert engine.scheduler.cold
        for _ in range(4):
            list(engine.tokens(PROMPT, GREEDY))
    assert (tmp_path / "learn.dali.gguf").is_file()
    with Engine(path, **options) as engine:
        assert not engine.scheduler.cold
        stored, counts = engine.scheduler.known.stored, engine.scheduler.known.counts
        assert stored.tokens >= 64 and (counts.sum(1) == stored.tokens * USED).all()
        per = engine.scheduler.cache.resident.sum(1)
        for row in range(LAYERS):
            hot = np.argsort(-counts[row], kind="stable")[: per[row]]
            assert engine.scheduler.cache.resident[row, hot].all()


def test_costs_are_measured(path):
    """The real measurement, on a layer of the small model."""
    with Engine(path, device="cpu-torch", threads=1, **SIZES) as engine:
        scheduler = engine.scheduler
        costs = REAL_MEASURE(engine.device, scheduler.cpu.cpu, scheduler.experts[0]).costs
    assert (costs.c[1:65] > 0).all() and (costs.g[1:65] > 0).all()
    assert costs.t > 0 and 0 < costs.r <= 1 and costs.h_cpu >= 0


REAL_MEASURE = gpu_measure.measure
