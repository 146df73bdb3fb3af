"""Made-up expert tensors in files, in every form that GGUF files have, for tests of the disk
tier."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q

from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor

FORMS = ("merged", "one by one", "fused")
F, D = 24, 96  # rows of gate and up; columns in Q8_0 (three blocks a row): nothing divides a page


class File:
    """Appends tensors of random bytes to a file at unaligned offsets."""

    def __init__(self, path: Path, seed: int = 0):
        self.path = path
        self.rng = np.random.default_rng(seed)
        self.pieces = [self.rng.bytes(1000)]
        self.size = 1000

    def tensor(self, name: str, shape: tuple[int, ...], kind: Q = Q.Q8_0) -> Tensor:
        empty = Tensor(name, kind, shape, np.zeros(0, np.uint8))
        data = np.frombuffer(self.rng.bytes(int(np.prod(shape[:-1])) * empty.row_bytes), np.uint8)
        tensor = Tensor(name, kind, shape, data, str(self.path), self.size)
        self.pieces += [data.tobytes(), self.rng.bytes(32)]
        self.size += data.size + 32
        return tensor

    def write(self) -> None:
        self.path.write_bytes(b"".join(self.pieces))


def layer_experts(file: File, layer: int, n_expert: int, form: str, down: Q = Q.Q8_0,
                  down_file: File | None = None) -> LayerExperts:
    """One layer in a form of FORMS; its down matrices may lie in another shard."""
    name, shard = f"blk.{layer}.ffn_", down_file or file
    if form == "one by one":
        ones = [
            [f.tensor(f"{name}{role}.{e}.weight", shape, kind) for e in range(n_expert)]
            for role, f, shape, kind in (
                ("gate", file, (F, D), Q.Q8_0),
                ("up", file, (F, D), Q.Q8_0),
                ("down", shard, (D, 64), down),
            )
        ]
        return LayerExperts(layer, *(tuple(one) for one in ones))
    whole = shard.tensor(f"{name}down_exps.weight", (n_expert, D, 64), down)
    downs = tuple(whole.expert(e) for e in range(n_expert))
    if form == "fused":
        both = file.tensor(f"{name}gate_up_exps.weight", (n_expert, 2 * F, D))
        gates = tuple(both.part(2 * F * e, F) for e in range(n_expert))
        ups = tuple(both.part(2 * F * e + F, F) for e in range(n_expert))
        return LayerExperts(layer, gates, ups, downs)
    gate = file.tensor(f"{name}gate_exps.weight", (n_expert, F, D))
    up = file.tensor(f"{name}up_exps.weight", (n_expert, F, D))
    return LayerExperts(
        layer, tuple(gate.expert(e) for e in range(n_expert)),
        tuple(up.expert(e) for e in range(n_expert)), downs,
    )


def model(folder: Path, n_layer: int = 4, n_expert: int = 8, form: str = "merged",
          shards: int = 1, odd_down: Q = Q.Q8_0) -> dict[int, LayerExperts]:
    """n_layer layers spread over shards; every second layer's down matrices have the type
    odd_down."""
    files = [File(folder / f"model-{i}.gguf", i) for i in range(shards)]
    layers = {}
    for i in range(n_layer):
        kind = odd_down if i % 2 else Q.Q8_0
        own, other = files[i % shards], files[(i + 1) % shards]
        layers[i] = layer_experts(own, i, n_expert, form, kind, other)
    for file in files:
        file.write()
    return layers
