"""The figures of `dali-gguf simulate --report`: what the policies reach on a trace. Simulated.

Costs are a hardware profile's at a big model's sizes, the routing is the trace's; only the deciding
time is measured, on the machine at hand. Policies learn from the calibration part of the trace (the
first 40 % of each document) and are judged on the rest.
"""

import time
from dataclasses import dataclass, replace

import numpy as np

from dali_gguf.offload import balance, cache, hardware_profile, placement, predict_trace, synthetic
from dali_gguf.offload import simulate as sim
from dali_gguf.offload import trace as traces
from dali_gguf.offload.cache import CacheSettings
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.hardware_profile import Hardware, Shape
from dali_gguf.offload.trace import Trace

PREDICTORS = ("linear", "residual", "next-router", "frequency")
CACHES = ("lru", "lfu", "lfru", "static", "belady")
BATCHES = (1, 8, 32, 512)  # of the placement instances
MOST_STEPS = 4096  # of a simulated run
PROMPT = 512
GOALS = {  # key: (goal, what it says)
    "placement_vs_optimal_mean": (0.995, "placement, optimum / ours, mean"),
    "placement_vs_optimal_worst": (0.98, "placement, optimum / ours, worst"),
    "prefetch_recall": (0.90, "recall of the next layer's experts, best predictor"),
    "prefetch_precision_nonresident": (0.85, "precision of the first non-resident prefetch"),
    "hit_rate_b1_40": (0.87, "cache hits at 40 %, batch 1, by expert"),
    "hit_rate_b8_40": (0.81, "cache hits at 40 %, batch 8, by token"),
    "speedup_decode_vs_static_layers": (1.9, "decode over static layers"),
    "speedup_decode_vs_static_hot": (1.2, "decode over static hot"),
    "speedup_prefill_vs_static_layers": (1.8, "prefill 512 over pipelined streaming"),
    "balance_decode": (balance.GOAL, "balance of CPU and GPU+link, decode"),
    "balance_prefill": (balance.GOAL, "balance of CPU and GPU+link, prefill 512"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """A trace cut in two and what prices it. resident: the hot experts of the calibration part."""

    calibration: Trace
    evaluation: Trace
    machine: Hardware
    model: Shape
    share: float
    batch: int

    @property
    def counts(self) -> np.ndarray:
        return self.calibration.counts()

    @property
    def slots(self) -> int:
        """Slots a layer for the cache figures: the nearest whole number to the share."""
        return max(1, round(self.share * self.evaluation.n_expert))

    @property
    def resident(self) -> np.ndarray:
        return placement.resident_hot(self.counts, self.slots * self.evaluation.n_layer)


def full_report(study: Study, say=lambda text: None) -> dict:
    """All figures. say(text) tells what is being done."""
    say("placement against the optimum")
    out = placement_figures(study)
    say("predictors")
    figures, predicted = prefetch_figures(study)
    out |= figures
    say("caches")
    out |= cache_figures(study)
    say("decode and prefill")
    out |= speed_figures(study, predicted)
    out["decide_share_of_layer"] = out["decide_us_128"] / out.pop("layer_us")
    return out | {
        "profile": study.machine.name,
        "budget": study.share,
        "batch": study.batch,
        "model_sizes": study.model.name,
        "trace": study.evaluation.model,
        "trace_tokens": len(study.evaluation.ids),
        "simulated": True,
    }


def instances(study: Study, per_batch: int, seed: int = 0, batches=BATCHES):
    """(workload int64 [E], resident uint8 [E]) of recorded steps at each batch size, and
    random ones of 128 experts with skewed workloads."""
    rng, ids, resident = np.random.default_rng(seed), study.evaluation.ids, study.resident
    for batch in batches:
        for _ in range(per_batch):
            layer, start = rng.integers(ids.shape[1]), rng.integers(max(len(ids) - batch, 1))
            rows = (
                np.arange(start, start + batch)
                if batch >= 512
                else rng.integers(len(ids), size=batch)
            )
            chosen = ids[rows % len(ids), layer].ravel()
            yield np.bincount(chosen, minlength=study.evaluation.n_expert), resident[layer]
    for _ in range(per_batch):
        tokens = int(2 ** rng.uniform(0, 9))
        chosen = (rng.random(8 * tokens) ** rng.uniform(1, 3) * 128).astype(np.int64)
        hot = (np.arange(128) < 51) if rng.random() < 0.5 else rng.random(128) < 0.4
        yield np.bincount(chosen, minlength=128), hot.astype(np.uint8)


def placement_figures(study: Study, per_batch: int = 400) -> dict:
    """Optimal makespan over each policy's: mean, 1st percentile and worst; deciding time."""
    costs = hardware_profile.costs(study.machine, study.model, 512)
    found = {"threshold": [], "greedy": [], "margin": []}
    for workload, resident in instances(study, per_batch):
        active = np.flatnonzero(workload)
        here = resident[active] != 0
        miss, res = workload[active[~here]], workload[active[here]]
        best = placement.plan(miss, res, costs, policy="optimal")[2]
        for name, policy, margin in (
            ("threshold", "threshold", 0.0),
            ("greedy", "greedy", 0.0),
            ("margin", "threshold", placement.MARGIN),
        ):
            found[name].append(best / placement.plan(miss, res, costs, 0.0, policy, margin)[2])
    out = {"placement_instances": len(found["threshold"])}
    for name, key in (("threshold", ""), ("greedy", "_greedy"), ("margin", "_with_margin")):
        ratio = np.array(found[name])
        out |= {
            f"placement_vs_optimal_mean{key}": float(ratio.mean()),
            f"placement_vs_optimal_p01{key}": float(np.percentile(ratio, 1)),
            f"placement_vs_optimal_worst{key}": float(ratio.min()),
        }
    return out | {"decide_us_128": deciding_us(costs)}


def deciding_us(costs: Costs, n_expert: int = 128, repeats: int = 50) -> float:
    """Measured: one threshold plan of a step of 8 tokens, 8 experts each; the best of many."""
    rng = np.random.default_rng(0)
    workload = np.bincount(rng.integers(0, n_expert, 64), minlength=n_expert)
    resident = (rng.random(n_expert) < 0.4).astype(np.uint8)
    planner, best = placement.Planner("threshold", n_expert), np.inf
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(100):
            planner.plan(workload, resident, costs)
        best = min(best, time.perf_counter() - started)
    return best / 100 * 1e6


def prefetch_figures(study: Study) -> tuple[dict, dict[str, np.ndarray]]:
    """Recalls and precisions of every predictor, and the ids [T, L, A] each predicts."""
    calibration, evaluation = study.calibration, study.evaluation
    out, predicted, recalls = {}, {}, {}
    for kind in PREDICTORS:
        ranking = predict_trace.rankings(kind, calibration, evaluation)
        layers = predict_trace.judge(ranking, evaluation, study.resident)
        recalls[kind] = [a.recall for a in layers]
        key = kind.replace("-", "_")
        out |= {
            f"prefetch_recall_{key}": _mean(a.recall for a in layers),
            f"prefetch_recall_2a_{key}": _mean(a.recall_2a for a in layers),
            f"prefetch_precision_{key}": _mean(a.precision for a in layers),
        }
        ids = predict_trace.best_ids(ranking, evaluation.n_used)
        ids[:, 0] = evaluation.ids[:, 0]
        predicted[kind] = ids
    best = max(PREDICTORS[:2], key=lambda k: out[f"prefetch_recall_{k}"])
    beaten = np.maximum(recalls["next-router"], recalls["frequency"])
    out |= {
        "prefetch_predictor": best,
        "prefetch_recall": out[f"prefetch_recall_{best}"],
        "prefetch_precision_nonresident": out[f"prefetch_precision_{best}"],
        "prefetch_recall_per_layer": [round(r, 4) for r in recalls[best]],
        "prefetch_above_others_in_every_layer": bool((np.array(recalls[best]) > beaten).all()),
    }
    return out, predicted


def cache_figures(study: Study) -> dict:
    """Hit rates of a cache without a link: by expert at batch 1, by token at batch 8."""
    out = {"cache_slots_per_layer": study.slots}
    chosen = {"": cache.settings("decayed"), "_paper": cache.settings("workload")}
    chosen |= {f"_{name}": CacheSettings(name) for name in CACHES}
    for batch, kind in ((1, "by_expert"), (8, "by_token")):
        order = traces.decode_order(study.evaluation, batch)
        workload = traces.step_workload(
            traces.step_ids(study.evaluation.ids, order), study.evaluation.n_expert
        )
        for key, settings in chosen.items():
            rates = cache.hit_rates(workload, study.resident, settings, study.counts)
            out[f"hit_rate_b{batch}_40{key}"] = float(rates[kind])
            out[f"fills_per_100_uses_b{batch}{key}"] = float(100 * rates["fills_per_use"])
        out[f"hit_rate_b{batch}_40_share_of_belady"] = (
            out[f"hit_rate_b{batch}_40"] / out[f"hit_rate_b{batch}_40_belady"]
        )
    return out


def table(
    study: Study, policies, predicted: dict[str, np.ndarray], prefill: bool = False
) -> list[sim.Result]:
    """One simulated run a policy. prefill: prompts of `batch` tokens."""
    evaluation = study.evaluation
    if prefill:
        order = traces.prefill_order(evaluation, study.batch)
    else:
        order = traces.decode_order(evaluation, study.batch)[:MOST_STEPS]
    setting = sim.Setting(study.machine, study.model, study.share, study.batch, prefill)
    ids, counts = traces.step_ids(evaluation.ids, order), study.counts
    results = []
    for policy in policies:
        guess = predicted.get(policy.predictor)
        guess = ids if guess is None else traces.step_ids(guess, order)
        results.append(sim.simulate(policy, setting, ids, guess, counts))
    return results


def speed_figures(study: Study, predicted: dict[str, np.ndarray]) -> dict:
    """Tokens per second over the static baselines, busy shares, the paper's settings beside."""
    runs = table(study, sim.policies(), predicted)
    ours, base = runs[-1], {r.policy: r.tokens_per_s for r in runs}
    paper = max(r.tokens_per_s for r in runs if r.policy.startswith("paper"))
    prompts, guess = synthetic_prompts(study)
    prefill = prefill_run(prompts, guess)
    own = prefill_run(replace(study, batch=PROMPT), predicted["residual"])
    return balance_figures(study, predicted, prompts, guess) | {
        "speedup_decode_vs_static_layers": ours.tokens_per_s / base["static-layers"],
        "speedup_decode_vs_static_hot": ours.tokens_per_s / base["static-hot"],
        "speedup_decode_paper_vs_static_layers": paper / base["static-layers"],
        "speedup_decode_paper_vs_static_hot": paper / base["static-hot"],
        "speedup_prefill_vs_static_layers": over_streaming(prefill),
        "speedup_prefill_vs_static_layers_own_trace": over_streaming(own),
        "prefill_trace": "synthetic, fitted to Qwen3-30B (128 experts, 8 used)",
        "cpu_busy": ours.cpu_both,
        "gpu_busy": ours.gpu_both,
        "imbalance": ours.imbalance,
        "cpu_busy_prefill": prefill[-1].cpu_both,
        "gpu_busy_prefill": prefill[-1].gpu_both,
        "imbalance_prefill": prefill[-1].imbalance,
        "layer_us": 1e6 * study.batch / ours.tokens_per_s / study.model.n_layer,
        "decode": [_row(r) for r in runs],
        "prefill": [_row(r) for r in prefill],
        "prefill_own_trace": [_row(r) for r in own],
    }


def synthetic_prompts(study: Study) -> tuple[Study, np.ndarray]:
    """Prompts with routing like Qwen3's, and the ids predicted for them. The trace's own routing is
    of 32 experts with 4 used: too small a part of a layer of Qwen3's size to show much."""
    made, guess = synthetic.qwen3_like()
    cut = made.n_sequence // 3
    parts = [traces.select(made, range(cut)), traces.select(made, range(cut, made.n_sequence))]
    return Study(*parts, study.machine, study.model, study.share, PROMPT), guess[made.starts[cut] :]


def prefill_run(prompts: Study, guess: np.ndarray, policies=None) -> list[sim.Result]:
    return table(prompts, policies or sim.prefill_policies(), {"residual": guess}, prefill=True)


def balance_figures(study: Study, predicted, prompts: Study, guess: np.ndarray) -> dict:
    """Of the last policies of the tables, for every hardware profile."""
    ours, ring = sim.policies()[-1:], sim.prefill_policies()[-1:]
    steps = [i for i, _ in zip(instances(study, 200, batches=(study.batch,)), range(200))]
    return balance.figures(
        study.machine,
        study.model,
        steps,
        lambda machine: table(replace(study, machine=machine), ours, predicted)[0],
        lambda machine: prefill_run(replace(prompts, machine=machine), guess, ring)[0],
    )


def over_streaming(runs: list[sim.Result]) -> float:
    """The last run over the best static-layers run."""
    static = [r.tokens_per_s for r in runs if r.policy.startswith("static-layers")]
    return runs[-1].tokens_per_s / max(static)


def _row(r: sim.Result) -> dict:
    names = (
        "policy",
        "tokens_per_s",
        "hit_rate",
        "token_hit_rate",
        "prefetch_accuracy",
        "prefetch_late",
        "gigabytes_per_step",
        "cpu_share",
        "gpu_share",
        "link_share",
        "cpu_both",
        "gpu_both",
        "imbalance",
    )
    return {n: getattr(r, n) if n == "policy" else round(getattr(r, n), 4) for n in names}


def _mean(values) -> float:
    return float(np.mean(list(values)))
