"""Where an expert's matrices lie on disk, and where they go in a slot of memory.

Every form of expert tensors comes here as one Tensor a matrix (merged `_exps`, one tensor an
expert, fused gate_up): only file, offset and length count. Ranges that touch on disk are read as
one.
"""

from dataclasses import dataclass

from dali_gguf.offload.direct_io import page_floor, page_span
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """nbytes at offset of path, read to `at` in the slot (page-aligned). name: of its first
    tensor."""

    path: str
    offset: int
    nbytes: int
    at: int
    name: str


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """extents: what to read. starts: where gate, up and down begin in the slot. nbytes: of the
    slot."""

    extents: tuple[Extent, ...]
    starts: tuple[int, int, int]
    nbytes: int


def lay_out(matrices: tuple[Tensor, Tensor, Tensor]) -> ExpertLayout:
    """The layout of one expert (gate, up, down)."""
    extents: list[Extent] = []
    starts = [0, 0, 0]
    at = 0
    for role in sorted(range(3), key=lambda i: (matrices[i].file, matrices[i].offset)):
        t = matrices[role]
        last = extents[-1] if extents else None
        if last is not None and (last.path, last.offset + last.nbytes) == (t.file, t.offset):
            extents[-1] = Extent(t.file, last.offset, last.nbytes + t.nbytes, last.at, last.name)
        else:
            extents.append(Extent(t.file, t.offset, t.nbytes, at, t.name))
        starts[role] = extents[-1].at + t.offset - page_floor(extents[-1].offset)
        at = extents[-1].at + page_span(extents[-1].offset, extents[-1].nbytes)
    return ExpertLayout(tuple(extents), (starts[0], starts[1], starts[2]), at)


def layer_layouts(experts: LayerExperts) -> list[ExpertLayout]:
    """One layout an expert of the layer."""
    return [lay_out(experts.matrices(e)) for e in range(experts.n_expert)]


def slot_sizes(layers: dict[int, LayerExperts],
               layouts: dict[int, list[ExpertLayout]]) -> dict[int, int]:
    """Slot size of each layer, the same for layers whose experts have the same size: where a range
    lies in its first page must not split them into classes."""
    kind = {layer: experts.expert_bytes() for layer, experts in layers.items()}
    slot = dict.fromkeys(kind.values(), 0)
    for layer, ones in layouts.items():
        slot[kind[layer]] = max(slot[kind[layer]], *(layout.nbytes for layout in ones))
    return {layer: slot[kind[layer]] for layer in layers}
