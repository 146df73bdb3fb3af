import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf.errors import InputError
from dali_gguf.offload import vram
from dali_gguf.tensor import Tensor

SIZES = np.array([100, 100, 160])


def plan(room, whole=False, n_expert=8, sizes=SIZES):
    return vram.plan_vram(room, 1000, 500, 200, sizes, n_expert, whole)


def test_everything_fits():
    p = plan(1700 + 8 * 360)
    assert p.fits and p.slots.tolist() == [8, 8, 8] and p.spare == 0 and p.expert_bytes == 2880


@pytest.mark.parametrize("left", [0, 99, 500, 1040, 1041, 2000, 2879])
@pytest.mark.parametrize("whole", [False, True])
def test_never_more_than_the_room(left, whole):
    p = plan(1700 + left, whole)
    assert p.fits and p.expert_bytes <= left and p.wanted == 2880
    assert p.expert_bytes == (p.slots * SIZES).sum() + p.spare * 260
    if whole:
        assert set(p.slots.tolist()) <= {0, 8} and p.spare == 0
        assert (np.diff(p.slots) >= 0).all(), "the last layers"
    else:
        assert p.slots.max() - p.slots.min() <= 1
        assert p.spare * 260 <= left / 4


def test_by_hand():
    """2000 bytes: 1 spare of each size (4 x 260 <= 2000), 1740 left: 4 a layer, 300 left: two of
    100 more, and none of 160."""
    p = plan(3700)
    assert (p.spare, p.slots.tolist(), p.expert_bytes) == (1, [5, 5, 4], 1900)
    assert plan(3700, whole=True).slots.tolist() == [0, 0, 8]


def test_weights_that_do_not_fit():
    p = plan(1699)
    assert not p.fits and p.slots.sum() == 0


@pytest.mark.parametrize("form", ["merged", "single", "fused"])
def test_slot_sizes_of_every_form(form):
    """4 experts of [8, 32] Q8_0 matrices: 272 bytes each, rounded up to 512."""
    shape = {"merged": (4, 8, 32), "single": (8, 32), "fused": (4, 16, 32)}[form]
    roles = ("gate_up", "down") if form == "fused" else ("gate", "up", "down")
    tensors = {"blk.0.attn_q.weight": tensor((8, 32)), "blk.0.ffn_gate.weight": tensor((8, 32))}
    for role in roles:
        if form == "single":
            names = {f"blk.3.ffn_{role}.{e}.weight": tensor(shape) for e in range(4)}
        else:
            names = {
                f"blk.3.ffn_{role}_exps.weight": tensor(shape if role != "down" else (4, 8, 32))
            }
        tensors |= names
    assert vram.slot_bytes(tensors, 4) == {3: 3 * 512}


def tensor(shape):
    return Tensor("", Q.Q8_0, shape, np.zeros(int(np.prod(shape)) // 32 * 34, np.uint8))


def test_budget():
    assert vram.budget(None, 1000, 2000) == (940, None)
    assert vram.budget("1G", 2 << 30, 8 << 30) == (1 << 30, None)
    room, line = vram.budget(6 << 30, 4 << 30, 8 << 30)
    assert room == int(0.94 * (4 << 30)) and "6.0G is more than is free; planning with 3.8G" in line
    with pytest.raises(InputError, match="--vram 9.0G: the device has 8.0G"):
        vram.budget("9G", 4 << 30, 8 << 30)


def test_the_line_tells_all_uses():
    line = plan(3700).line(8)
    assert all(word in line for word in ("weights", "KV cache", "scratch", "58% resident"))
