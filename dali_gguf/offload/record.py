"""Records the routing of a model while it reads a text: a scheduler that wraps another one."""

from pathlib import Path

import numpy as np
from gguf.quants import dequantize

from dali_gguf.device import Array
from dali_gguf.errors import InputError
from dali_gguf.offload.trace import Trace
from dali_gguf.routing import Routing
from dali_gguf.tensor import Tensor

DOCUMENT_END = "\f"  # a form feed in a text separates documents
LEAST_TOKENS = 64  # a shorter rest of a document is left out
INPUT_BYTES = 1 << 29  # of router inputs kept; then ids and weights only
REPORT_TEXT = Path(__file__).parent / "report_text.txt"


class RecordingScheduler:
    """Does what the wrapped scheduler does, and keeps ids, weights and inputs of every step.

    keep_inputs can be switched off when enough is recorded."""

    recordable = False

    def __init__(self, inner):
        self.inner = inner
        self.device, self.experts, self.routers = inner.device, inner.experts, inner.routers
        self.keep_inputs = True
        self.ids: dict[int, list] = {layer: [] for layer in sorted(inner.experts)}
        self.weights: dict[int, list] = {layer: [] for layer in self.ids}
        self.inputs: dict[int, list] = {layer: [] for layer in self.ids}

    def route(self, layer: int, h: Array, router) -> Routing:
        return self.inner.route(layer, h, router)

    def moe(self, layer: int, h: Array, routing: Routing) -> Array:
        self.ids[layer].append(routing.expert_ids.astype(np.int16))
        self.weights[layer].append(routing.weights.astype(np.float16))
        if self.keep_inputs:
            self.inputs[layer].append(self.device.to_host(h).astype(np.float16))
        return self.inner.moe(layer, h, routing)

    def disk_stats(self):
        return self.inner.disk_stats()

    def rule(self, layer: int):
        return self.inner.rule(layer)

    def line(self) -> str:
        return self.inner.line()

    def figures(self) -> dict:
        return self.inner.figures()

    def table(self) -> str:
        return self.inner.table()

    def close(self) -> None:
        self.inner.close()

    def stacked(self, kept: dict[int, list]) -> np.ndarray:
        """One array [T, L, ..] of what was kept."""
        return np.stack([np.concatenate(kept[layer]) for layer in kept], 1)


def record(engine, text: str, length: int = 512, documents: int | None = None) -> Trace:
    """Has an Engine read text (documents separated by form feeds) in sequences of `length` tokens.
    InputError for a model without experts or a text that is too short."""
    if not engine.scheduler.experts:
        raise InputError(f"{engine.path} has no experts: a trace needs a Mixture-of-Experts model")
    length = min(length, engine.n_ctx)
    scheduler = RecordingScheduler(engine.scheduler)
    engine.scheduler = scheduler
    starts, owners = [0], []
    try:
        for number, document in enumerate(text.split(DOCUMENT_END)[:documents]):
            for ids in sequences(engine.tokenizer.encode(document), length):
                _read(engine, ids)
                starts.append(starts[-1] + len(ids))
                owners.append(number)
                width = engine.config.n_embd * 2 * len(scheduler.ids)
                scheduler.keep_inputs = starts[-1] * width < INPUT_BYTES
    finally:
        engine.scheduler = scheduler.inner
    if not owners:
        raise InputError(f"the text is too short: expected at least {LEAST_TOKENS} tokens")
    return _trace(engine, scheduler, starts, owners)


def sequences(ids: list[int], length: int) -> list[list[int]]:
    """ids in parts of `length`; a shorter rest only if there is nothing else."""
    parts = [ids[i : i + length] for i in range(0, len(ids), length)]
    whole = [p for p in parts if len(p) == length]
    return whole or [p for p in parts if len(p) >= min(LEAST_TOKENS, length)]


def _read(engine, ids: list[int]) -> None:
    """One sequence from an empty context, in prefill steps."""
    for start in range(0, len(ids), engine.options.n_batch):
        part = np.asarray(ids[start : start + engine.options.n_batch], np.int32)
        engine.forward(part, np.arange(start, start + len(part)), rows=None)


def _trace(engine, scheduler: RecordingScheduler, starts, owners) -> Trace:
    layers = sorted(scheduler.experts)
    first = scheduler.experts[layers[0]]
    inputs = scheduler.stacked(scheduler.inputs)
    return Trace(
        ids=scheduler.stacked(scheduler.ids),
        weights=scheduler.stacked(scheduler.weights),
        starts=np.array(starts, np.int64),
        documents=np.array(owners, np.int32),
        inputs=inputs,
        routers=np.stack(router_matrices(engine.file.tensors, layers)),
        correction=np.stack([correction(engine, i) for i in layers]),
        n_expert=first.n_expert,
        n_embd=engine.config.n_embd,
        n_ff_exp=first.gate[0].rows,
        expert_bytes=first.expert_bytes(),
        model=engine.path.name,
    )


def router_matrices(tensors: dict[str, Tensor], layers) -> list[np.ndarray]:
    """float32 [E, D] of each layer's router, from the file."""
    found = [tensors[f"blk.{i}.ffn_gate_inp.weight"] for i in layers]
    return [
        dequantize(np.ascontiguousarray(t.data).reshape(t.rows, -1), t.type)
        .reshape(t.shape)
        .astype(np.float32)
        for t in found
    ]


def correction(engine, layer: int) -> np.ndarray:
    """float32 [E] added before choosing: the router's bias, and DeepSeek-V3's choice bias (taken as
    added to the logits, which is what predictions compare)."""
    total = np.zeros(engine.scheduler.experts[layer].n_expert, np.float32)
    bias = engine.file.tensors.get(f"blk.{layer}.ffn_gate_inp.bias")
    if bias is not None:
        total += dequantize(np.ascontiguousarray(bias.data), bias.type).ravel()
    choice = engine.scheduler.rule(layer).bias
    return total if choice is None else total + np.asarray(choice, np.float32)
