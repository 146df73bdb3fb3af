"""Drawings of a simulation (matplotlib, extra `plot`): a layer's timeline, figures against VRAM."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload import event_state
from dali_gguf.offload import simulate as sim
from dali_gguf.offload import trace as traces
from dali_gguf.offload.report import Study, table

ROWS = {
    event_state.LOG_ATTENTION: ("attention", "GPU", "tab:gray"),
    event_state.LOG_GPU: ("experts on the GPU", "GPU", "tab:green"),
    event_state.LOG_CPU: ("experts on the CPU", "CPU", "tab:blue"),
    event_state.LOG_DEMAND: ("copy on demand", "link", "tab:red"),
    event_state.LOG_PREFETCH: ("prefetch", "link", "tab:orange"),
    event_state.LOG_FILL: ("cache fill", "link", "tab:purple"),
}
LANES = ("link", "GPU", "CPU")
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
SHOWN_LAYERS = 3


def check() -> None:
    """InputError without matplotlib; asked before the long work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'dali-gguf[plot]'")


def draw(
    study: Study, policies: list[sim.Policy], predicted: dict[str, np.ndarray], path: Path
) -> None:
    """Writes the picture: three layers of a step under the last policy, then hits and tokens/s of
    it and of static-layers and static-hot at several shares of resident experts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, 1)
    _timeline(above, _log(study, policies[-1], predicted))
    _against_memory(below, study, policies, predicted)
    figure.suptitle(
        f"simulated: {study.machine.title}, priced as {study.model.name}, batch {study.batch}",
        fontsize=10,
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path}: {error}") from None


def _log(study: Study, policy: sim.Policy, predicted) -> np.ndarray:
    """Rows (kind, layer, start, end) of one step, in the warm half of the run."""
    order = traces.decode_order(study.evaluation, study.batch)[:256]
    ids = traces.step_ids(study.evaluation.ids, order)
    guess = predicted.get(policy.predictor)
    guess = ids if guess is None else traces.step_ids(guess, order)
    setting = sim.Setting(study.machine, study.model, study.share, study.batch)
    return sim.simulate(policy, setting, ids, guess, study.counts, log_step=len(ids) // 2).log


def _timeline(axes, log: np.ndarray) -> None:
    log = log[log[:, 1] < SHOWN_LAYERS]
    start = log[:, 2].min()
    for kind, (label, lane, color) in ROWS.items():
        rows = log[log[:, 0] == kind]
        bars = [(a - start, b - a) for a, b in rows[:, 2:]]
        y = LANES.index(lane)
        axes.broken_barh(bars, (y - 0.35, 0.7), color=color, edgecolor="white", label=label)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_xlabel("microseconds (simulated), three layers of one step")
    axes.set_ylim(-0.6, 3.4)  # room for the legend
    axes.legend(ncols=6, fontsize=8, loc="upper center")


def _against_memory(axes, study: Study, policies: list[sim.Policy], predicted) -> None:
    shown = [p for p in policies if p.name in ("static-layers", "static-hot")] + [policies[-1]]
    runs = [table(replace(study, share=s), shown, predicted) for s in SHARES]
    gigabytes = [
        s * study.model.n_layer * study.model.n_expert * study.model.expert_bytes / 1e9
        for s in SHARES
    ]
    hits = axes.twinx()
    for i, policy in enumerate(shown):
        speed = axes.plot(gigabytes, [r[i].tokens_per_s for r in runs], "o-", label=policy.name)
        hits.plot(gigabytes, [r[i].token_hit_rate for r in runs], ":", color=speed[0].get_color())
    axes.set_xlabel("GPU memory for experts, GB")
    axes.set_ylabel("tokens/s, simulated (solid)")
    hits.set_ylabel("hit rate by token (dotted)")
    axes.legend(fontsize=8)
