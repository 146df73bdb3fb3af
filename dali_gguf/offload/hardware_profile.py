"""Hardware profiles and model sizes for simulation: small TOML files in offload/hardware/.

They turn a machine and a model into the costs that policies read: c[w], g[w], t and the rest
(offload/cost.py), and into the time of a layer's attention and of the output head. Roofline
formulas: the larger of bytes / bandwidth and work / FLOPs, plus a launch.
"""

from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

import numpy as np

from dali_gguf.errors import InputError
from dali_gguf.offload.cost import Costs

FOLDER = Path(__file__).parent / "hardware"
LEAST_RATE = 0.15  # the CPU keeps at least this share of its speed while the link copies


@dataclass(frozen=True, slots=True)
class Hardware:
    """Bandwidths in bytes/s, FLOP/s, fixed costs in microseconds, vram in bytes."""

    name: str
    title: str
    vram: float
    gpu_bandwidth: float
    gpu_flops: float
    link_bandwidth: float
    cpu_bandwidth: float
    cpu_flops: float
    dram_bandwidth: float
    gpu_launch: float = 2.0  # an expert inside a grouped kernel
    cpu_launch: float = 3.0  # barrier and activation quantization
    link_latency: float = 10.0  # a copy
    routing: float = 20.0  # routing to the host and back into the stream, in each dynamic layer
    h_cpu: float = 25.0  # activations to the CPU, result back, add
    layer_launch: float = 60.0  # kernels of a layer's attention, norms and router

    @property
    def r(self) -> float:
        """Speed of the CPU kernels while the link copies: what the shared DRAM leaves them."""
        left = (self.dram_bandwidth - self.link_bandwidth) / self.cpu_bandwidth
        return float(np.clip(left, LEAST_RATE, 1.0))


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model (hardware/shapes.toml says what each means)."""

    name: str
    n_layer: int
    n_expert: int
    n_used: int
    n_embd: int
    n_ff_exp: int
    bits_per_weight: float
    attn_params: float
    attn_bytes: float
    kv_bytes: float
    head_bytes: float

    @property
    def expert_params(self) -> int:
        return 3 * self.n_embd * self.n_ff_exp

    @property
    def expert_bytes(self) -> float:
        return self.expert_params * self.bits_per_weight / 8

    @property
    def dense_bytes(self) -> float:
        """All that is not routed experts: attention of every layer, embedding and head."""
        return self.n_layer * self.attn_bytes + 2 * self.head_bytes


def names() -> list[str]:
    return sorted(p.stem for p in FOLDER.glob("*.toml") if p.stem != "shapes")


@lru_cache
def hardware(name: str) -> Hardware:
    """A profile by name, or by the path of a .toml file. InputError: unknown, or a key missing."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if name == "shapes" or not path.is_file():
        raise InputError(
            f"hardware profile {name!r} is unknown: choose one of {', '.join(names())}, "
            "or give a .toml file"
        )
    return _fill(Hardware, path.stem, read_toml(path)[""], path)


@lru_cache
def shape(name: str) -> Shape:
    path = FOLDER / "shapes.toml"
    sections = read_toml(path)
    if name not in sections or not name:
        known = ", ".join(s for s in sections if s)
        raise InputError(f"model size {name!r} is unknown: choose one of {known}")
    return _fill(Shape, name, sections[name], path)


def _fill(kind, name: str, values: dict, path: Path):
    known = {f.name for f in fields(kind)} - {"name"}
    missing = [
        f.name
        for f in fields(kind)
        if f.name != "name" and f.name not in values and f.default is f.default_factory
    ]
    foreign = sorted(set(values) - known)
    if missing or foreign:
        what = f"lacks {missing[0]}" if missing else f"has the unknown key {foreign[0]}"
        raise InputError(f"{path.name} {what}: expected the keys of rtx3060-12g.toml")
    return kind(
        name,
        *(
            values[f.name] if f.name in values else f.default
            for f in fields(kind)
            if f.name != "name"
        ),
    )


def read_toml(path: Path) -> dict[str, dict]:
    """{section: {key: number or string}}, "" for keys before the first section. The subset these
    files use: tomllib came with Python 3.11 only."""
    sections: dict[str, dict] = {"": {}}
    here = sections[""]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if line.startswith("[") and line.endswith("]"):
            here = sections.setdefault(line[1:-1].strip(), {})
        elif line:
            key, equals, value = (x.strip() for x in line.partition("="))
            try:
                quoted = value.startswith('"') and value.endswith('"')
                here[key] = value[1:-1] if quoted else float(value)
            except ValueError:
                equals = ""
            if not equals:
                raise InputError(f"{path.name} line {number}: {line!r} is not key = number")
    return sections


def costs(machine: Hardware, model: Shape, max_tokens: int = 4096) -> Costs:
    """c[w], g[w] and t of an expert, microseconds."""
    w = np.arange(max_tokens + 1.0)
    work, size = 2.0 * model.expert_params * w, model.expert_bytes
    c = (
        1e6 * np.maximum(size / machine.cpu_bandwidth, work / machine.cpu_flops)
        + machine.cpu_launch
    )
    g = (
        1e6 * np.maximum(size / machine.gpu_bandwidth, work / machine.gpu_flops)
        + machine.gpu_launch
    )
    c[0] = g[0] = 0.0
    t = 1e6 * size / machine.link_bandwidth + machine.link_latency
    return Costs(c, g, t, machine.h_cpu, machine.r)


def attention_us(
    machine: Hardware, model: Shape, tokens: int, context: int, prefill: bool
) -> float:
    """A layer's attention, norms and router on the GPU; context: tokens in the KV cache of each
    sequence (one sequence in prefill, `tokens` sequences in decode)."""
    kv = model.kv_bytes * context * (1 if prefill else tokens)
    read = (model.attn_bytes + kv) / machine.gpu_bandwidth
    work = 2.0 * model.attn_params * tokens / machine.gpu_flops
    return machine.layer_launch + 1e6 * max(read, work) + 2.0 * tokens**0.5


def head_us(machine: Hardware, model: Shape, tokens: int) -> float:
    """The output head for `tokens` tokens (1 in prefill), sampling included."""
    read = model.head_bytes / machine.gpu_bandwidth
    work = 2.4 * model.head_bytes * min(tokens, 32) / machine.gpu_flops
    return 100.0 + 1e6 * max(read, work)
