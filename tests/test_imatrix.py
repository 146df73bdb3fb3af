"""Importance matrices: what is collected, how it is stored, and the rule for experts nobody
used."""

import struct

import numpy as np
import pytest

from dali_gguf.cli import main
from dali_gguf.convert.imatrix_file import FLOOR, Entry, Importance, load, normalized, save
from dali_gguf.engine import Engine
from dali_gguf.errors import ModelFileError
from dali_gguf.gguf_file import GGUFFile
from tests.numpy_device import NumpyDevice
from tests.small_gguf import EXPERTS, LAYERS, USED, write_small


def entry(sum2, counts) -> Entry:
    return Entry(np.array(sum2, np.float32), np.array(counts, np.float32))


def test_mean_of_a_row_is_one():
    rows = normalized(entry([[2, 6], [10, 30]], [1, 10]))
    assert np.allclose(rows, [[0.5, 1.5], [0.5, 1.5]])


def test_unused_expert_gets_the_mean_of_the_others():
    rows = normalized(entry([[2, 6], [0, 0], [9, 3]], [2, 0, 6]))
    assert np.allclose(rows[1], (2 * rows[0] + 6 * rows[2]) / 8)


def test_nothing_used_means_plain_least_squares():
    assert np.array_equal(normalized(entry([[0, 0], [0, 0]], [0, 0])), np.ones((2, 2)))


def test_unused_column_counts_a_little():
    assert normalized(entry([[0, 4]], [1]))[0, 0] == np.float32(FLOOR)


def test_there_and_back(tmp_path):
    entries = {
        "blk.0.a.weight": entry([[1, 2], [3, 4]], [5, 0]),
        "blk.0.b.weight": entry([[1, 2, 3]], [9]),
    }
    save(tmp_path / "im.gguf", Importance("x", entries, ["a.txt", "b.txt"], 7, 512))
    found = load(tmp_path / "im.gguf")
    assert (found.datasets, found.chunk_count, found.chunk_size) == (["a.txt", "b.txt"], 7, 512)
    for name, e in entries.items():
        assert np.array_equal(found.entries[name].sum2, e.sum2)
        assert np.array_equal(found.entries[name].counts, e.counts)
    tensors = GGUFFile.open(tmp_path / "im.gguf").tensors
    assert tensors["blk.0.a.weight.in_sum2"].shape == (2, 2)
    assert tensors["blk.0.a.weight.counts"].shape == (2, 1)
    assert "blk.0.a.weight: 1 of 2 experts" in found.coverage_report()


def test_older_form(tmp_path):
    """llama.cpp's .dat: a stack of experts is one long row."""
    name, values = b"blk.0.up.weight", np.arange(1, 7, dtype=np.float32)
    raw = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 2, 6) + values.tobytes()
    (tmp_path / "im.dat").write_bytes(raw + struct.pack("<ii", 3, 5) + b"a.txt")
    found = load(tmp_path / "im.dat")
    assert (found.chunk_count, found.datasets) == (3, ["a.txt"])
    assert np.allclose(found.of("blk.0.up.weight", (2, 8, 3)), [[0.5, 1, 1.5], [0.8, 1, 1.2]])


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"\x05\0\0\0abc", b"nonsense" * 20])
def test_damaged_file(raw, tmp_path):
    (tmp_path / "im.gguf").write_bytes(raw)
    with pytest.raises(ModelFileError, match="im.gguf"):
        load(tmp_path / "im.gguf")


def test_values_that_are_not_finite(tmp_path):
    save(tmp_path / "im.gguf", Importance("", {"w": entry([[np.inf, 1]], [1])}, [], 1, 1))
    with pytest.raises(ModelFileError, match="not finite"):
        load(tmp_path / "im.gguf")


class Seen(NumpyDevice):
    """Keeps the inputs of products, by tensor name, as the reference for the collector."""

    def __init__(self):
        super().__init__()
        self.inputs = {}

    def matmul(self, x, *weights):
        for w in weights:
            self.inputs.setdefault(w.name, []).append(np.asarray(x, np.float64))
        return super().matmul(x, *weights)


def test_collected_sums_are_those_of_the_inputs(tmp_path, capsys):
    """Against the reference device, which runs the experts one at a time as well."""
    model = write_small(tmp_path / "m.gguf")
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 some words, and bytes: \u00e9\u00e8 " * 8)
    out = tmp_path / "im.gguf"
    assert (
        main(["imatrix", str(model), "-f", str(text), "-o", str(out), "-c", "32", "--chunks", "2"])
        == 0
    )
    found = load(out)
    assert (found.chunk_count, found.chunk_size) == (2, 32)
    seen = Seen()
    with Engine(model, n_ctx=32, device=seen, n_batch=32) as engine:
        ids = engine.tokenizer.encode(text.read_text())
        for i in range(2):
            run = [engine.tokenizer.bos_id, *ids[32 * i + 1 : 32 * i + 32]]
            engine.forward(run, range(32), rows=None)
    expected = {"blk.0.attn_q.weight", "blk.1.ffn_gate_inp.weight"}
    assert expected <= found.entries.keys()
    for i in range(LAYERS):
        for role in ("gate", "up", "down"):
            name = f"blk.{i}.ffn_{role}_exps.weight"
            got = found.entries[name]
            assert got.counts.sum() == 64 * USED and len(got.counts) == EXPERTS
            for e in range(EXPERTS):
                rows = np.concatenate(
                    seen.inputs.get(f"{name}[{e}]", [np.zeros((0, got.sum2.shape[1]))])
                )
                assert len(rows) == got.counts[e]
                assert np.allclose(got.sum2[e], (rows**2).sum(0), rtol=0.05, atol=1e-3)
    q = np.concatenate(seen.inputs["blk.1.attn_q.weight"])
    assert np.allclose(
        found.entries["blk.1.attn_q.weight"].sum2[0], (q**2).sum(0), rtol=0.05, atol=1e-3
    )
    assert found.entries["blk.1.attn_q.weight"].counts.tolist() == [64]


def test_text_that_is_too_short(tmp_path, capsys):
    model = write_small(tmp_path / "m.gguf")
    (tmp_path / "t.txt").write_text("w1")
    assert main(["imatrix", str(model), "-f", str(tmp_path / "t.txt"), "-c", "32"]) == 2
    assert "expected at least 32" in capsys.readouterr().err
