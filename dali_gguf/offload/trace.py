"""Routing traces: which experts every token used in every layer. Recorded, read, cut, laid out.

A .npz file holds int16 ids [T, L, A], float16 weights [T, L, A], the sequences' starts int64
[S + 1] and documents int32 [S], the model's name and sizes, and for prediction float16 inputs
[T', L, D] (the routers' inputs of the first T' tokens) and float32 routers [L, E, D].
trace_csv.py reads the other form.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload import trace_csv

SHAPE_KEYS = ("n_expert", "n_embd", "n_ff_exp", "expert_bytes")
ARRAYS = ("ids", "weights", "starts", "documents", "inputs", "routers", "correction")
CALIBRATION = 0.4  # share of each document's sequences that policies may learn from


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """ids int16 [T, L, A], weights float16 [T, L, A], starts int64 [S + 1], documents int32 [S].

    inputs float16 [T', L, D] (T' <= T, maybe 0), routers float32 [L, E, D], correction float32
    [L, E] (added to the logits before choosing, 0 for most models). expert_bytes: of one expert.
    model: name and fingerprint of the model file."""

    ids: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    documents: np.ndarray
    inputs: np.ndarray
    routers: np.ndarray
    correction: np.ndarray
    n_expert: int
    n_embd: int = 0
    n_ff_exp: int = 0
    expert_bytes: int = 0
    model: str = ""

    @property
    def n_layer(self) -> int:
        return self.ids.shape[1]

    @property
    def n_used(self) -> int:
        return self.ids.shape[2]

    @property
    def n_sequence(self) -> int:
        return len(self.documents)

    def sequence(self, s: int) -> slice:
        return slice(int(self.starts[s]), int(self.starts[s + 1]))

    def counts(self) -> np.ndarray:
        """Tokens routed to each expert, int64 [L, E]."""
        return count_experts(self.ids.transpose(1, 0, 2).reshape(self.n_layer, -1), self.n_expert)

    def check_model(self, n_layer: int, n_expert: int, n_used: int, what: str) -> None:
        """InputError unless the trace has these sizes (what: where they come from)."""
        found, expected = (self.n_layer, self.n_expert, self.n_used), (n_layer, n_expert, n_used)
        if found != expected:
            raise InputError(
                f"trace of another model: it has {found[0]} layers of {found[1]} experts, "
                f"{found[2]} used; {what} has {expected[0]} of {expected[1]}, {expected[2]} used: "
                "record one with dali-gguf trace"
            )


def count_experts(ids: np.ndarray, n_expert: int) -> np.ndarray:
    """ids [N, K] to counts int64 [N, E]."""
    n = len(ids)
    flat = (np.arange(n)[:, None] * n_expert + ids).ravel()
    return np.bincount(flat, minlength=n * n_expert).reshape(n, n_expert)


def select(trace: Trace, sequences) -> Trace:
    """The trace of some sequences. Inputs are kept when all of them have them."""
    parts = [trace.sequence(s) for s in sequences]
    rows = np.concatenate([np.arange(p.start, p.stop) for p in parts] or [np.zeros(0, np.int64)])
    inputs = trace.inputs[:0]
    if len(rows) and rows.max() < len(trace.inputs):
        inputs = trace.inputs[rows]
    starts = np.concatenate([[0], np.cumsum([p.stop - p.start for p in parts])]).astype(np.int64)
    return replace(
        trace,
        ids=trace.ids[rows],
        weights=trace.weights[rows],
        starts=starts,
        documents=trace.documents[list(sequences)],
        inputs=inputs,
    )


def split(trace: Trace) -> tuple[Trace, Trace]:
    """(calibration, evaluation): of each document the first 40 % of its sequences and the rest. A
    trace of one sequence a document is cut over documents; a single sequence is cut in two."""
    if trace.n_sequence == 1:
        cut = int(len(trace.ids) * CALIBRATION)
        trace = replace(
            trace, starts=np.array([0, cut, len(trace.ids)]), documents=np.array([0, 1], np.int32)
        )
    groups = [np.flatnonzero(trace.documents == d) for d in np.unique(trace.documents)]
    if max(map(len, groups)) == 1:
        groups = [np.concatenate(groups)]
    first, rest = [], []
    for g in groups:
        n = min(max(round(len(g) * CALIBRATION), 1), max(len(g) - 1, 1))
        first, rest = first + list(g[:n]), rest + list(g[n:])
    return select(trace, first), select(trace, rest or first)


def decode_order(trace: Trace, batch: int) -> np.ndarray:
    """Token rows int64 [steps, batch] of batched decoding: `batch` sequences side by side, step by
    step, then the next ones; with batch 1 simply all tokens."""
    groups = []
    for b in range(0, trace.n_sequence - batch + 1, batch):
        parts = [trace.sequence(s) for s in range(b, b + batch)]
        n = min(p.stop - p.start for p in parts)
        groups.append(np.stack([np.arange(p.start, p.start + n) for p in parts], 1))
    if not groups:
        raise InputError(
            f"the trace has {trace.n_sequence} sequences to replay, fewer than the "
            f"batch of {batch}: record a longer text or use a smaller --batch"
        )
    return np.concatenate(groups)


def prefill_order(trace: Trace, tokens: int) -> np.ndarray:
    """Token rows [steps, tokens] of prompts of `tokens` tokens, cut from the text in order."""
    steps = len(trace.ids) // tokens
    if not steps:
        raise InputError(
            f"the trace has {len(trace.ids)} tokens to replay, fewer than a prompt of "
            f"{tokens}: record a longer text"
        )
    return np.arange(steps * tokens).reshape(steps, tokens)


def step_ids(ids: np.ndarray, order: np.ndarray) -> np.ndarray:
    """ids [T, L, A] in the order [S, B]: int16 [S, L, B * A]."""
    steps, batch = order.shape
    taken = ids[order].transpose(0, 2, 1, 3)
    return np.ascontiguousarray(taken.reshape(steps, ids.shape[1], batch * ids.shape[2]))


def step_workload(ids: np.ndarray, n_expert: int) -> np.ndarray:
    """ids [S, L, N] to tokens per expert, int64 [S, L, E]."""
    steps, layers, n = ids.shape
    return count_experts(ids.reshape(-1, n), n_expert).reshape(steps, layers, n_expert)


def save(trace: Trace, path: str | Path) -> None:
    """To exactly this path. InputError if it cannot be written."""
    arrays = {k: getattr(trace, k) for k in ARRAYS}
    sizes = np.array([getattr(trace, k) for k in SHAPE_KEYS], np.int64)
    try:
        with open(path, "wb") as file:  # np.savez adds .npz to a name without it
            np.savez(file, sizes=sizes, model=np.array(trace.model), **arrays)
    except OSError as error:
        raise InputError(f"trace {path}: cannot be written ({error.strerror})") from None


def load(path: str | Path) -> Trace:
    """Reads .npz or .csv. InputError for a missing, foreign or incomplete file."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"trace {path}: no such file")
    if path.suffix == ".csv":
        return Trace(**trace_csv.read(path))
    if not is_zipfile(path):
        raise InputError(
            f"trace {path}: not a trace file: record one with dali-gguf trace, or give a .csv"
        )
    try:
        with np.load(path, allow_pickle=False) as f:
            arrays = {k: f[k] for k in ARRAYS}
            sizes = dict(zip(SHAPE_KEYS, f["sizes"].tolist()))
            model = str(f["model"])
    except (KeyError, ValueError, OSError, EOFError, BadZipFile) as error:
        raise InputError(
            f"trace {path}: not a trace file (found {error}): record one with "
            "dali-gguf trace, or give a .csv"
        ) from None
    trace = Trace(model=model, **arrays, **sizes)
    _check(trace, path)
    return trace


def _check(trace: Trace, path: Path) -> None:
    ids, starts = trace.ids, trace.starts
    if ids.ndim != 3 or not ids.size or starts[0] != 0 or starts[-1] != len(ids):
        raise InputError(
            f"trace {path}: damaged (ids {ids.shape}, sequences end at {starts[-1]}): "
            "record it again"
        )
    missing = np.flatnonzero((ids < 0).any((0, 2)) | (ids >= trace.n_expert).any((0, 2)))
    if missing.size:
        raise InputError(
            f"trace {path}: layer {missing[0]} is missing or has experts outside 0.."
            f"{trace.n_expert - 1}: record it again"
        )
