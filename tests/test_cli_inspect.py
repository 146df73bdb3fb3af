"""The inspect command and the inventory behind it."""

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from dali_gguf import inventory
from dali_gguf.cli import main
from dali_gguf.tensor import Tensor
from tests import vocabularies
from tests.small_gguf import EXPERTS, LAYERS, USED, D, F, write_small


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_small(tmp_path_factory.mktemp("inspect") / "small.gguf"))


def test_json(path, capsys):
    assert main(["inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "llama" and found["files"] == [path]
    assert found["sizes"]["embedding"] == D and found["sizes"]["layers"] == LAYERS
    experts = found["experts"]
    assert (experts["count"], experts["used"]) == (EXPERTS, USED)
    assert experts["bytes"] == LAYERS * 3 * EXPERTS * F * D * 34 // 32
    row = next(row for row in found["tensors"] if row["group"] == "experts")
    assert row["type"] == "Q8_0" and row["bits_per_weight"] == 8.5
    assert row["tensors"] == 3 * LAYERS and row["weights"] == LAYERS * 3 * EXPERTS * F * D
    for key in ("tensors", "weights", "bytes"):
        assert sum(row[key] for row in found["tensors"]) == found["total"][key]
    assert found["tokenizer"]["model"] == "llama" and found["tokenizer"]["bos"] == "<s>"
    assert experts["bytes_per_token"] == found["total"]["bytes"] - experts["bytes"] // 2


def test_text(path, capsys):
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert f"{EXPERTS} a layer, {USED} used" in out and "no chat template" in out
    table = [line for line in out.splitlines() if line.startswith("experts  ")]
    assert table[-1].split()[1] == "Q8_0" and table[-1].split()[-1] == "8.50"


def test_vocabulary_only(tmp_path, capsys):
    path = str(vocabularies.write(tmp_path / "v.gguf", vocabularies.metadata("bpe")))
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "no weights, a vocabulary only" in out and "gpt2 (smollm), 1024 tokens" in out


def test_odd_keys_do_not_matter(tmp_path, capsys):
    odd = {"general.name": ["a"], "llama.expert_count": "many", "llama.expert_used_count": 0}
    odd |= {"tokenizer.ggml.model": [1, 2], "tokenizer.ggml.tokens": 5, "llama.block_count": [1, 2]}
    path = str(vocabularies.write(tmp_path / "odd.gguf", odd))
    assert main(["inspect", path]) == 0 and main(["inspect", path, "--json"]) == 0


def test_errors(tmp_path, capsys):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    assert main(["inspect", str(tmp_path / "cut.gguf")]) == 2
    error = capsys.readouterr().err
    assert "cut.gguf" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("token_embd.weight", "embedding"),
        ("output.weight", "output"),
        ("output_norm.weight", "norms"),
        ("blk.0.attn_q_norm.weight", "norms"),
        ("blk.0.attn_q.bias", "attention"),
        ("blk.0.attn_kv_a_mqa.weight", "attention"),
        ("blk.0.ffn_norm.weight", "norms"),
        ("blk.0.ffn_gate_inp.weight", "routers"),
        ("blk.0.exp_probs_b.bias", "routers"),
        ("blk.0.ffn_gate_inp_shexp.weight", "shared experts"),
        ("blk.0.ffn_up_shexp.weight", "shared experts"),
        ("blk.0.ffn_up_exps.weight", "experts"),
        ("blk.0.ffn_gate_up_exps.weight", "experts"),
        ("blk.0.ffn_gate.7.weight", "experts"),
        ("blk.0.ffn_gate.weight", "feed-forward"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_groups(name, group):
    assert inventory.group_of(name) == group


def test_rows_are_summed_by_group_and_type():
    def tensor(name: str, kind: GGMLQuantizationType, nbytes: int) -> Tensor:
        return Tensor(name, kind, (2, 32), np.zeros(nbytes, np.uint8))

    q8, f32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.F32
    names = [("blk.0.ffn_up_exps.weight", q8, 68), ("blk.1.ffn_up_exps.weight", q8, 68)]
    names += [("token_embd.weight", f32, 256)]
    rows = inventory.rows(tensor(*name) for name in names)
    assert [(row.group, row.type, row.tensors, row.bytes) for row in rows] == [
        ("experts", "Q8_0", 2, 136),
        ("embedding", "F32", 1, 256),
    ]
    assert rows[0].bits_per_weight == 8.5 and inventory.total(rows).type == "mixed"
