"""gpu_tier.py while a model runs: memory that runs out, the last fallback, stored costs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dali_gguf.engine import Engine  # noqa: E402
from dali_gguf.errors import MemoryBudgetError  # noqa: E402
from dali_gguf.offload import gpu_measure  # noqa: E402
from dali_gguf.offload.cost_store import Profile  # noqa: E402
from dali_gguf.offload.prefetch import rank  # noqa: E402
from dali_gguf.offload.scheduler import Scheduler  # noqa: E402
from tests.small_gguf import EXPERTS  # noqa: E402
from tests.test_devices import (  # noqa: E402, F401
    GREEDY, PROMPT, SIZES, half, made_up_costs, path, reference,
)


def test_memory_that_runs_out_in_a_step(path, half, reference, capsys, monkeypatch):
    """The step is done again with fewer experts on the device, and the text does not change."""
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        before, calls, real = engine.scheduler, [], engine.device.compute
        slots = engine._tier.plan_of.slots.sum()

        def compute(*args):
            calls.append(args)
            if len(calls) in (3, 12):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return real(*args)

        monkeypatch.setattr(engine.device, "compute", compute)
        assert list(engine.tokens(PROMPT, GREEDY)) == reference[0]
        assert len(calls) > 12 and engine.scheduler is not before
        assert engine._tier.plan_of.slots.sum() < slots
    lines = [line for line in capsys.readouterr().err.splitlines() if "ran out" in line]
    assert len(lines) == 2 and all("going on with" in line for line in lines)


def test_memory_that_runs_out_without_any_expert_there(path, half, monkeypatch):
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:

        def norm(*args):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(engine.device, "rms_norm", norm)
        with pytest.raises(MemoryBudgetError, match="no expert is left"):
            engine.forward([5], [0])


def test_other_errors_are_not_taken_for_missing_memory(path, half, monkeypatch):
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:

        def norm(*args):
            raise RuntimeError("an illegal memory access")

        monkeypatch.setattr(engine.device, "rms_norm", norm)
        with pytest.raises(RuntimeError, match="illegal"):
            engine.forward([5], [0])


@pytest.mark.parametrize("layers_us,stays", [(1e3, True), (1e9, False)])
def test_whole_layers_get_a_trial_when_nothing_dynamic_pays(path, half, capsys, layers_us, stays):
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        steps = iter(range(64))
        expected = engine.forward([5], [next(steps)])
        pays = engine.scheduler.pays
        pays.trials = dict.fromkeys(pays.trials, 1)
        engine.scheduler.recent_us.extend([1e6] * 24)
        engine.forward([5], [next(steps)])
        assert engine._tier.placement == "threshold"  # something still pays
        pays.on = dict.fromkeys(pays.on, False)
        engine.forward([5], [next(steps)])
        assert engine.scheduler.choices.placement == "static-layers"
        assert np.abs(engine.forward([5], [0]) - expected).max() < 0.02 * np.abs(expected).max()
        engine.scheduler.recent_us.extend([layers_us] * 24)
        engine.forward([5], [next(steps)])
        placement = engine.scheduler.choices.placement
        assert placement == ("static-layers" if stays else "static-hot")
        settled = engine.scheduler
        engine.scheduler.recent_us.extend([1e12] * 24)
        engine.forward([5], [next(steps)])
        assert engine.scheduler is settled
        assert f"placement {placement}" in engine.scheduler.line()
    assert f"fastest split: {placement} from now on" in capsys.readouterr().err


def test_a_scheduler_without_measured_steps_stays(path, half):
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        plain = Scheduler(engine.device, {}, {})
        assert engine._tier.reviewed(plain) is plain


@pytest.mark.parametrize("placement", ["threshold", "all-gpu"])
def test_a_placement_that_was_named_stays(path, half, capsys, placement):
    options = {"vram": half, "placement": placement, **SIZES}
    with Engine(path, device="cpu-torch", threads=1, **options) as engine:
        engine.forward([5], [0])
        scheduler = engine.scheduler
        assert not {"copies", "moves"} & set(scheduler.pays.on)
        scheduler.pays.trials = dict.fromkeys(scheduler.pays.trials, 1)
        scheduler.pays.on = dict.fromkeys(scheduler.pays.on, False)
        scheduler.recent_us.extend([1e6] * 24)
        engine.forward([5], [1])
        assert engine.scheduler is scheduler
        assert f"placement {placement} as asked" in scheduler.line()
    assert "from now on" not in capsys.readouterr().err


def test_routing_and_prediction_are_one_product(path, half, reference, monkeypatch):
    """As separate products: the same text, and the same guesses."""
    texts, guessed = [], []
    for stacked in (True, False):
        if not stacked:
            monkeypatch.setattr("dali_gguf.offload.torch_weight.pairs_of", lambda weights: [])
        options = {"vram": half, "placement": "threshold", **SIZES}
        with Engine(path, device="cpu-torch", threads=1, **options) as engine:
            assert (engine.scheduler.paired is not None) == stacked
            seen, predictor = [], engine.scheduler.guesser.predictor
            real = predictor.worth

            def worth(layer, h, ahead, near, costs, most):
                assert (ahead is not None) == stacked
                seen.append(predictor.ranking(layer, h, ahead))
                found = real(layer, h, ahead, near, costs, most)
                best = rank(predictor.predict(layer, h, ahead), near, costs)
                assert found == [expert for expert, _ in best[:most]]
                return found

            predictor.worth = worth
            engine.scheduler.gap.room = lambda *_: 100
            texts.append(list(engine.tokens(PROMPT, GREEDY)))
            guessed.append(seen)
    assert texts[0] == texts[1] == reference[0]
    together = min(map(len, guessed))  # trials of single features differ in time
    assert together > 4
    for a, b in list(zip(*guessed))[:4]:
        assert np.abs(a - b).max() < 1e-3 * np.abs(b).max()


def test_stored_costs_are_used(path, half, monkeypatch):
    """calibrate's profile of this machine and these experts, and no new measurement."""
    found = []

    def load(machine, shape):
        found.append((machine, shape))
        return Profile(machine, shape, [1, 2, 4], [9, 12, 18], [4, 4.5, 5], 6.0, 0.5, 0.8, 100.0)

    monkeypatch.setattr("dali_gguf.offload.cost_store.load", load)
    monkeypatch.setattr(gpu_measure, "measure", lambda *_: pytest.fail("measured"))
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        assert engine.scheduler.model.copy_us == 6.0
    (machine, shape), = found
    assert "1 threads, torch on the CPU" in machine and f"{EXPERTS} experts of" in shape


def test_a_product_is_not_taken_in_a_later_step(path, half, monkeypatch):
    """Guesses go on and off from step to step: what a layer takes is of its own step or nothing."""
    with Engine(path, device="cpu-torch", threads=1, vram=half, **SIZES) as engine:
        scheduler, kept, taken = engine.scheduler, {}, []
        paired = scheduler.paired
        keep, take = paired.keep, paired.take

        def kept_in(layer, product):
            kept[layer] = position
            keep(layer, product)

        def taken_in(layer, n_expert):
            products = take(layer, n_expert)
            taken.append(products is not None)
            assert products is None or kept[layer] == position
            return products

        monkeypatch.setattr(paired, "keep", kept_in)
        monkeypatch.setattr(paired, "take", taken_in)
        for position in range(12):
            on = {"prefetch"} if position // 2 % 2 else set()
            monkeypatch.setattr(scheduler.step, "_features", lambda on=on: on)
            kept.clear()
            engine.forward([30 + position], [position])
    assert True in taken
