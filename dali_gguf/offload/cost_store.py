"""Measured costs, a JSON file per machine and model shape in the user's cache folder.

A file that is damaged, or that another machine or other sizes wrote, counts as none: it is measured
again, and one line says so.
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from dali_gguf.kernels import isa, user_cache_dir
from dali_gguf.offload.cost import CostModel
from dali_gguf.replacing import replacing
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor

VERSION = 2


@dataclass(frozen=True, slots=True)
class Profile:
    """What calibrate measured, microseconds. tokens, cpu_us, gpu_us: anchors as in CostModel
    (gpu_us empty without a GPU). dense_us: all of a decoded token's step but the experts, on the
    CPU; h_cpu: fixed part of a layer's experts. disk_bandwidth: bytes/s, 0 if not measured."""

    machine: str
    shape: str
    tokens: list[int]
    cpu_us: list[float]
    gpu_us: list[float]
    copy_us: float
    h_cpu: float
    r: float
    dense_us: float
    disk_bandwidth: float = 0.0
    expert_bytes: int = 0

    def model(self, max_tokens: int = 4096) -> CostModel:
        t_disk = 1e6 * self.expert_bytes / self.disk_bandwidth if self.disk_bandwidth else 0.0
        return CostModel(
            self.tokens,
            self.cpu_us,
            self.gpu_us or None,
            self.copy_us,
            self.h_cpu,
            self.r,
            t_disk,
            max_tokens,
        )


def machine_name(threads: int, gpu: str = "") -> str:
    """The CPU, its instruction set, threads used, and the GPU."""
    return f"{isa.cpu_name()}, {isa.NAME}, {threads} threads, {gpu or 'no GPU'}"


def shape_name(experts: LayerExperts) -> str:
    """Sizes and types of one layer's experts."""
    return _shape(experts.n_expert, experts.matrices(0))


def shape_of_file(tensors: dict[str, Tensor], layer: int, n_expert: int) -> str:
    """The same from a file's tensors: stacked (_exps), one each (.0), gate and up in one."""

    def find(role: str) -> Tensor | None:
        names = (f"blk.{layer}.ffn_{role}_exps.weight", f"blk.{layer}.ffn_{role}.0.weight")
        return next((tensors[n] for n in names if n in tensors), None)

    both = find("gate_up")
    if both is None:
        return _shape(n_expert, [find(role) for role in ("gate", "up", "down")])
    half = both.part(0, both.rows // 2)
    return _shape(n_expert, [half, half, find("down")])


def _shape(n_expert: int, matrices) -> str:
    parts = [f"{t.rows}x{t.cols} {t.type.name}" for t in matrices]
    return f"{n_expert} experts of {', '.join(parts)}"


def stored(shape: str, threads: int, gpu: bool = True) -> Profile | None:
    """A usable profile of this CPU and these experts. gpu: one with a GPU before one without, or
    the other way round."""
    cpu = machine_name(threads).rsplit(", ", 1)[0]
    found = []
    for path in sorted((user_cache_dir() / "costs").glob("*.json")):
        try:
            values = json.loads(path.read_text())
            if values["shape"] == shape and values["machine"].startswith(cpu):
                found.append(_checked(values, values["machine"], shape))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # calibrate says so and makes a new one
    return max(found, key=lambda p: bool(p.gpu_us) == gpu, default=None)


def path_of(machine: str, shape: str) -> Path:
    mark = hashlib.sha256(f"{machine}\n{shape}".encode()).hexdigest()[:16]
    return user_cache_dir() / "costs" / f"{mark}.json"


def save(profile: Profile) -> Path:
    """Writes in one step, so that a reader never sees half a file."""
    path = path_of(profile.machine, profile.shape)
    with replacing(path) as part:
        part.write_text(json.dumps({"version": VERSION, **asdict(profile)}, indent=1))
    return path


def load(machine: str, shape: str, say=None) -> Profile | None:
    """The stored profile, or None: there is none, or it is unusable (one line)."""
    path = path_of(machine, shape)
    if not path.is_file():
        return None
    try:
        return _checked(json.loads(path.read_text()), machine, shape)
    except (OSError, ValueError, TypeError, KeyError) as error:
        say = say or sys.stderr.write
        say(f"dali-gguf: cost profile {path} is not usable ({error}); measuring again\n")
        return None


def _checked(values: dict, machine: str, shape: str) -> Profile:
    if values.pop("version") != VERSION:
        raise ValueError("written by another version")
    profile = Profile(**values)
    if (profile.machine, profile.shape) != (machine, shape):
        raise ValueError("of another machine or model")
    numbers = [*profile.cpu_us, *profile.gpu_us, profile.r]
    n = len(profile.tokens)
    if not n or len(profile.cpu_us) != n or len(profile.gpu_us) not in (0, n):
        raise ValueError("numbers are missing")
    if not all(0 < x < 1e9 for x in numbers) or profile.tokens != [1 << i for i in range(n)]:
        raise ValueError("numbers out of range")
    profile.model()
    return profile
