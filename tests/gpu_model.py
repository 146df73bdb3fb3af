"""A generated qwen3moe model without a tokenizer, and the least of an engine around it.

Some experts are much more popular than others, as in real models. Blocks are random bytes with
moderate scales.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

from dali_gguf import models
from dali_gguf.device import Step
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.layers import Pass
from dali_gguf.offload import devices
from dali_gguf.offload.budget import Room
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.devices import GpuOptions
from dali_gguf.offload.memory_plan import Demand, MemoryPlan
from dali_gguf.offload.scheduler import Scheduler


@dataclass(frozen=True)
class Sizes:
    n_layer: int
    n_embd: int
    n_ff: int
    n_expert: int
    n_used: int
    n_head: int
    head: int = 128
    n_head_kv: int = 2
    n_vocab: int = 4096


SMALL = Sizes(4, 256, 256, 16, 2, 4, head=64)
LARGE = Sizes(6, 2048, 768, 128, 8, 16)  # Qwen3-30B-A3B's experts, 6 of its 48 layers: 2 GB


def write_model(path: Path, s: Sizes, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_vocab_size(s.n_vocab)
    w.add_context_length(2048)
    w.add_embedding_length(s.n_embd)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.n_ff)
    w.add_expert_feed_forward_length(s.n_ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_key_length(s.head)
    w.add_value_length(s.head)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_expert_count(s.n_expert)
    w.add_expert_used_count(s.n_used)
    add(w, rng, "token_embd", (s.n_vocab, s.n_embd), Q.Q8_0)
    add(w, rng, "output", (s.n_vocab, s.n_embd), Q.Q6_K)
    w.add_tensor("output_norm.weight", np.ones(s.n_embd, np.float32))
    for i in range(s.n_layer):
        add_layer(w, rng, f"blk.{i}.", s)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def add_layer(w: gguf.GGUFWriter, rng, p: str, s: Sizes) -> None:
    n_q, n_kv = s.n_head * s.head, s.n_head_kv * s.head
    for name, rows in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        add(w, rng, f"{p}attn_{name}", (rows, s.n_embd), Q.Q4_K)
    add(w, rng, p + "attn_output", (s.n_embd, n_q), Q.Q4_K)
    for name, size in (
        ("attn_q", s.head),
        ("attn_k", s.head),
        ("attn", s.n_embd),
        ("ffn", s.n_embd),
    ):
        w.add_tensor(f"{p}{name}_norm.weight", np.ones(size, np.float32))
    popularity = np.exp(0.6 * rng.normal(size=(s.n_expert, 1)))
    router = popularity * rng.normal(size=(s.n_expert, s.n_embd)) / s.n_embd**0.5
    w.add_tensor(p + "ffn_gate_inp.weight", router.astype(np.float32))
    add(w, rng, p + "ffn_gate_exps", (s.n_expert, s.n_ff, s.n_embd), Q.Q4_K)
    add(w, rng, p + "ffn_up_exps", (s.n_expert, s.n_ff, s.n_embd), Q.Q4_K)
    add(w, rng, p + "ffn_down_exps", (s.n_expert, s.n_embd, s.n_ff), Q.Q6_K)


HALF_AT = {Q.Q4_K: (0, 2), Q.Q6_K: (208,), Q.Q8_0: (0,)}
SPAN = {Q.Q4_K: 300, Q.Q6_K: 1500, Q.Q8_0: 70}  # about the deviation of what the scale multiplies


def add(w: gguf.GGUFWriter, rng, name: str, shape: tuple[int, ...], kind: Q) -> None:
    """A tensor whose rows have about unit length."""
    block, nbytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, nbytes), dtype=np.uint8)
    for at in HALF_AT[kind]:
        scale = rng.uniform(0.5, 1.5, len(blocks)) / SPAN[kind] / shape[-1] ** 0.5
        blocks[:, at : at + 2] = scale.astype(np.float16)[:, None].view(np.uint8)
    w.add_tensor(f"{name}.weight", blocks.reshape(*shape[:-1], -1), raw_dtype=kind)


def made_up_costs() -> CostModel:
    """Costs at which every policy finds something to do on both sides."""
    return CostModel([1, 2, 4], [90, 120, 180], [40, 45, 50], copy_us=60, r=0.8)


class Runner:
    """Opens a model on a device and decodes greedily; the engine without tokenizer and sampler."""

    def __init__(self, path: Path, spec: str, costs=None, threads=None, n_batch=256, arena=0,
                 **policies):
        """arena: bytes of main memory for experts, if not all of them may be there."""
        memory = MemoryPlan(Demand(0, 0, 0, 0), Room(0, ""), True, arena) if arena else None
        self.file = GGUFFile.open(path)
        self.config = models.read_config(self.file)
        self.n_batch = n_batch
        load = devices.Load(1024, 1, n_batch, "f16")
        options = GpuOptions(**policies)
        self.tier = devices.plan_gpu(
            spec, threads, options, self.file.tensors, self.config, load
        )
        self.device = devices.open_device(spec, threads, self.tier)
        self.model = models.load_model(self.file, self.config, self.device)
        if self.tier is None:
            self.scheduler = Scheduler(self.device, self.model.experts, self.model.routers)
        else:
            self.scheduler = self.tier.make_scheduler(
                self.model, self.config, self.file, costs, memory
            )
        self.cache = self.model.new_cache(1, 1024, "f16")

    def forward(self, ids, start: int) -> np.ndarray:
        """float32 [T, n_vocab]."""
        ids = np.asarray(ids, np.int32)
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        step = Step(ids, positions, np.zeros(len(ids), np.int32))
        return self.device.to_host(self.model.forward(Pass(step, self.cache, self.scheduler)))

    def prefill(self, ids) -> np.ndarray:
        """Logits of the last step's tokens."""
        for start in range(0, len(ids), self.n_batch):
            logits = self.forward(ids[start : start + self.n_batch], start)
        return logits

    def follow(self, prompt, tokens) -> np.ndarray:
        """Logits [n, n_vocab] before each of tokens, fed one by one after the prompt."""
        rows, at = [self.prefill(prompt)[-1]], len(prompt)
        for i, token in enumerate(tokens[:-1]):
            rows.append(self.forward([token], at + i)[-1])
        return np.stack(rows)

    def greedy(self, prompt, n: int) -> tuple[list[int], float, float]:
        """(tokens, prefill tokens/s, decode tokens/s)."""
        started = time.perf_counter()
        logits = self.prefill(prompt)[-1]
        middle, out = time.perf_counter(), []
        for i in range(n):
            out.append(int(logits.argmax()))
            logits = self.forward([out[-1]], len(prompt) + i)[-1]
        ended = time.perf_counter()
        return out, len(prompt) / (middle - started), n / (ended - middle)

    def close(self) -> None:
        self.scheduler.close()
        self.device.close()
        self.file.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_) -> None:
        self.close()
