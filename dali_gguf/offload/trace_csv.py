"""Routing traces as text: a .csv file with the header step,layer,token,expert,weight.

`token` counts within a step. When every step has the same number of tokens, each token number is a
sequence of its own (batched decode); else all tokens are one sequence in the order of the steps.
"""

import csv
from pathlib import Path

import numpy as np

from dali_gguf.errors import InputError


def read(path: Path) -> dict:
    """The fields of a trace.Trace without prediction inputs. InputError for bad or missing rows."""
    rows = _csv_rows(path)
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]  # by step, token, layer
    token, first = np.unique(rows[:, :2].astype(np.int64), axis=0, return_inverse=True)
    first = first.ravel()
    layers = np.unique(rows[:, 2]).astype(np.int64)
    n_layer = int(layers[-1]) + 1
    if len(layers) != n_layer:
        gap = sorted(set(range(n_layer)) - set(layers.tolist()))[0]
        raise InputError(f"trace {path}: layer {gap} is missing: expected 0 to {n_layer - 1}")
    per = np.zeros((len(token), n_layer), np.int64)
    np.add.at(per, (first, rows[:, 2].astype(np.int64)), 1)
    n_used = int(per.max())
    if (per != n_used).any():
        t, layer = np.argwhere(per != n_used)[0]
        raise InputError(
            f"trace {path}: layer {layer} is missing at step {token[t, 0]}, token "
            f"{token[t, 1]}: found {per[t, layer]} experts, expected {n_used}"
        )
    ids = rows[:, 3].reshape(len(token), n_layer, n_used).astype(np.int16)
    weights = rows[:, 4].reshape(ids.shape).astype(np.float16)
    order, starts = _csv_sequences(token)
    n_expert = int(ids.max()) + 1
    return {
        "ids": ids[order],
        "weights": weights[order],
        "starts": starts,
        "n_expert": n_expert,
        "documents": np.zeros(len(starts) - 1, np.int32),
        "inputs": np.zeros((0, n_layer, 0), np.float16),
        "routers": np.zeros((n_layer, n_expert, 0), np.float32),
        "correction": np.zeros((n_layer, n_expert), np.float32),
    }


def _csv_rows(path: Path) -> np.ndarray:
    """float64 [N, 5]: step, token, layer, expert, weight."""
    names = ("step", "token", "layer", "expert", "weight")
    rows = []
    with open(path, newline="") as f:
        reader = csv.DictReader(f)
        if not set(names) <= set(reader.fieldnames or ()):
            raise InputError(
                f"trace {path}: the first line is {reader.fieldnames}, expected "
                "step,layer,token,expert,weight"
            )
        for row in reader:
            try:
                rows.append([float(row[n]) for n in names])
            except (TypeError, ValueError):
                raise InputError(
                    f"trace {path}: line {reader.line_num} is not five numbers"
                ) from None
    if not rows or min(r[3] for r in rows) < 0:
        raise InputError(f"trace {path}: no rows, or a negative expert")
    return np.array(rows)


def _csv_sequences(token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """token int64 [T, 2] (step, token number), sorted: (order of the tokens, starts)."""
    steps, per_step = np.unique(token[:, 0], return_counts=True)
    if (per_step == per_step[0]).all() and len(steps) > 1:
        order = np.lexsort((token[:, 0], token[:, 1]))
        return order, np.arange(per_step[0] + 1, dtype=np.int64) * len(steps)
    return np.arange(len(token)), np.array([0, len(token)])
