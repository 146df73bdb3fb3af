"""Predictors judged and applied on a trace: fitted on its calibration part, used on the rest."""

from dataclasses import dataclass

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload.prefetch import fit_linear, linear_features
from dali_gguf.offload.trace import Trace


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one layer's predictions: share of the used experts among the top A and top 2A predicted;
    how often the first predicted expert that is not resident is used."""

    recall: float
    recall_2a: float
    precision: float


def previous(x: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Row t - 1 for every token t; 0 for the first of a sequence."""
    y = np.roll(x, 1, axis=0)
    y[starts[:-1]] = 0
    return y


def need_inputs(trace: Trace) -> None:
    if len(trace.inputs) != len(trace.ids):
        raise InputError(
            "the trace has no router inputs, which predictors need: record one with "
            "dali-gguf trace, or choose --prefetch none or frequency"
        )


def rankings(kind: str, calibration: Trace, trace: Trace) -> np.ndarray:
    """float32 [T, L, E]: predicted ranking of every token and layer from the layer before (layer
    0, which nobody predicts, is zero). residual: with the calibration part's mean."""
    n, n_layer, n_expert = len(trace.ids), trace.n_layer, trace.n_expert
    out = np.zeros((n, n_layer, n_expert), np.float32)
    if kind == "none":
        return out
    if kind == "frequency":
        out[:, 1:] = calibration.counts()[1:]
        return out
    need_inputs(trace)
    for layer in range(1, n_layer):
        h = trace.inputs[:, layer - 1].astype(np.float32)
        w = trace.routers[layer]
        if kind == "linear":
            features = _features(trace, layer)
            out[:, layer] = features @ linear_map(calibration, layer)
            continue
        if kind == "residual":
            h = h + residual_mean(calibration, layer)
        out[:, layer] = h @ w.T + trace.correction[layer]
    return out


def residual_mean(trace: Trace, layer: int) -> np.ndarray:
    """Mean over tokens of h_layer - h_{layer - 1}: [D]."""
    need_inputs(trace)
    difference = trace.inputs[:, layer].astype(np.float32) - trace.inputs[:, layer - 1]
    return difference.mean(0, dtype=np.float64).astype(np.float32)


def linear_map(trace: Trace, layer: int) -> np.ndarray:
    """[3D + 1, E]: ridge map from `layer - 1` to the logits of `layer`."""
    need_inputs(trace)
    target = trace.inputs[:, layer].astype(np.float32) @ trace.routers[layer].T
    return fit_linear(_features(trace, layer), target + trace.correction[layer])


def _features(trace: Trace, layer: int) -> np.ndarray:
    own, after = (trace.inputs[:, i].astype(np.float32) for i in (layer - 1, layer))
    return linear_features(own, previous(own, trace.starts), previous(after, trace.starts))


def best_ids(ranking: np.ndarray, n: int) -> np.ndarray:
    """The n highest of the last axis, best first: int16."""
    part = np.argpartition(-ranking, n - 1, axis=-1)[..., :n]
    order = np.argsort(-np.take_along_axis(ranking, part, -1), axis=-1, kind="stable")
    return np.take_along_axis(part, order, -1).astype(np.int16)


def predicted_ids(kind: str, calibration: Trace, trace: Trace) -> np.ndarray:
    """int16 [T, L, A]: what a predictor says each token will use; layer 0 repeats its own ids."""
    ids = best_ids(rankings(kind, calibration, trace), trace.n_used)
    ids[:, 0] = trace.ids[:, 0]
    return ids


def judge(ranking: np.ndarray, trace: Trace, resident: np.ndarray) -> list[Accuracy]:
    """Accuracy per layer 1.. of rankings [T, L, E] with residents uint8 [L, E]."""
    a = trace.n_used
    out = []
    for layer in range(1, trace.n_layer):
        used = trace.ids[:, layer, :, None]
        top = best_ids(ranking[:, layer], min(2 * a, trace.n_expert))
        in_top = (used == top[:, None, :a]).any(-1).mean()
        in_two = (used == top[:, None]).any(-1).mean()
        absent = resident[layer][top[:, :a]] == 0
        rows = np.flatnonzero(absent.any(1))
        first = top[rows, absent[rows].argmax(1)]
        hit = (trace.ids[rows, layer] == first[:, None]).any(1)
        out.append(Accuracy(float(in_top), float(in_two), float(hit.mean()) if len(rows) else 0.0))
    return out
