"""Hardware profiles: files, formulas, errors."""

import numpy as np
import pytest

from dali_gguf.errors import InputError
from dali_gguf.offload import hardware_profile as hw
from dali_gguf.offload import simulate


@pytest.mark.parametrize(
    ("name", "r", "t", "c1", "g1"),
    [
        ("rtx3060-12g", 0.47, 124, 78, 13),
        ("rtx3090-epyc", 1.0, 123, 53, 6),
        ("rtx4060-laptop", 1.0, 252, 63, 18),
        ("rtx4090", 0.79, 124, 48, 6),
        ("rtx5090", 0.46, 64, 40, 4),
    ],
)
def test_costs_of_a_qwen3_expert(name, r, t, c1, g1):
    """The published table of the study, in microseconds."""
    machine = hw.hardware(name)
    costs = hw.costs(machine, hw.shape("qwen3-30b"), 64)
    assert machine.r == pytest.approx(r, abs=0.01)
    assert (costs.t, costs.c[1], costs.g[1]) == pytest.approx((t, c1, g1), abs=1)
    assert costs.c[0] == costs.g[0] == 0 and (np.diff(costs.c) >= 0).all()


def test_budget_to_share():
    machine, model = hw.hardware("rtx3060-12g"), hw.shape("qwen3-30b")
    shares = [simulate.share_of_budget(machine, model, v, 1) for v in (4e9, 6e9, None, 80e9)]
    assert 0 < shares[0] < shares[1] < shares[2] < shares[3] == 1
    with pytest.raises(InputError, match="holds no expert of qwen3-30b"):
        simulate.share_of_budget(machine, model, 1e9, 1)


def test_unknown_names():
    with pytest.raises(InputError, match="'gtx1' is unknown: choose one of rtx3060-12g"):
        hw.hardware("gtx1")
    with pytest.raises(InputError, match="'gpt2' is unknown: choose one of qwen3-30b"):
        hw.shape("gpt2")


def test_own_profile_file(tmp_path):
    text = (hw.FOLDER / "rtx4090.toml").read_text()
    path = tmp_path / "mine.toml"
    path.write_text(text + "routing = 5 # quick\n")
    assert hw.hardware(str(path)).routing == 5
    for change, message in (
        (text.replace("vram", "wram"), "lacks vram"),
        (text + "speed = 3\n", "unknown key speed"),
        (text + "link\n", "line 10: 'link' is not key = number"),
    ):
        path = tmp_path / f"{len(change)}{message[:3]}.toml"
        path.write_text(change)
        with pytest.raises(InputError, match=message):
            hw.hardware(str(path))
