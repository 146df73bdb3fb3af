"""dali-gguf quantize, from the command line to the file."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from dali_gguf.cli import main
from dali_gguf.convert.gguf_typed import read_typed
from dali_gguf.convert.imatrix_file import Entry, Importance, save
from dali_gguf.gguf_file import GGUFFile
from tests.small_gguf import EXPERTS, D, F, small_keys, small_tensors

import gguf


@pytest.fixture
def model(tmp_path):
    """A small llama MoE in F32. Rows are 64 and 32 wide: every K type falls back."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    small_keys(writer)
    for name, array in small_tensors().items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def run(model, out, *flags) -> GGUFFile:
    assert main(["quantize", str(model), str(out), *flags]) == 0
    return GGUFFile.open(out)


def values(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    return dequantize(tensor.data.reshape(-1, tensor.row_bytes), tensor.type).reshape(tensor.shape)


def test_weights_are_near_and_the_rest_is_copied(model, tmp_path):
    file = run(model, tmp_path / "q.gguf", "Q8_0")
    before, after = read_typed(model), read_typed(tmp_path / "q.gguf")
    assert {k: v for k, v in after.items() if k in before} == before
    assert after.keys() - before.keys() == {"general.quantization_version", "general.file_type"}
    for name, array in small_tensors().items():
        kept = array.ndim == 1 or "gate_inp" in name
        assert file.tensors[name].type == (T.F32 if kept else T.Q8_0)
        assert np.abs(values(file, name) - array).max() <= (
            0 if kept else 0.004 * np.abs(array).max()
        )


def test_one_thread_or_many_is_the_same_file(model, tmp_path):
    run(model, tmp_path / "a.gguf", "Q4_0", "-t", "1")
    run(model, tmp_path / "b.gguf", "Q4_0", "-t", "3")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_fallbacks_are_listed_with_true_bits(model, tmp_path, capsys):
    file = run(model, tmp_path / "q.gguf", "Q4_K_S")
    out = capsys.readouterr().out
    assert file.tensors["blk.1.ffn_up_exps.weight"].type == T.Q5_0
    assert "blk.1.ffn_up_exps.weight: rows of 64, Q4_K -> Q5_0 (5.50 bits per weight)" in out
    bits = 8 * sum(t.nbytes for t in file.tensors.values())
    weights = sum(int(np.prod(t.shape)) for t in file.tensors.values())
    assert f"{bits / weights:.2f} bits per weight" in out


def test_no_fallback_refuses(model, tmp_path, capsys):
    assert main(["quantize", str(model), str(tmp_path / "q.gguf"), "Q4_K_S", "--no-fallback"]) == 2
    assert "no multiple of Q4_K's block" in capsys.readouterr().err
    assert not (tmp_path / "q.gguf").exists()


def test_overrides(model, tmp_path):
    flags = [
        "--tensor-type",
        r"blk\.0\.ffn_down_exps=Q4_0",
        "--tensor-type",
        "ffn_down=F16",
        "--output-type",
        "BF16",
        "--token-embedding-type",
        "Q5_1",
        "--pure",
    ]
    kinds = {n: t.type for n, t in run(model, tmp_path / "q.gguf", "Q8_0", *flags).tensors.items()}
    assert kinds["blk.0.ffn_down_exps.weight"] == T.Q4_0
    assert kinds["blk.1.ffn_down_exps.weight"] == T.F16
    assert kinds["token_embd.weight"] == T.Q5_1
    assert kinds["blk.1.ffn_up_exps.weight"] == T.Q8_0


def test_override_that_matches_nothing_is_said(model, tmp_path, capsys):
    run(model, tmp_path / "q.gguf", "Q8_0", "--tensor-type", "blk.0.ffn_up_exps.3=Q4_0")
    assert "matches no tensor" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["attn_q", "=Q4_0", "attn_q=Q9", "(=Q4_0"])
def test_bad_override(flag, model, tmp_path, capsys):
    assert (
        main(["quantize", str(model), str(tmp_path / "q.gguf"), "Q8_0", "--tensor-type", flag]) == 2
    )
    assert not (tmp_path / "q.gguf").exists()


def test_quantized_input(model, tmp_path, capsys):
    run(model, tmp_path / "q8.gguf", "Q8_0")
    assert main(["quantize", str(tmp_path / "q8.gguf"), str(tmp_path / "q4.gguf"), "Q4_0"]) == 2
    assert "is already Q8_0" in capsys.readouterr().err
    file = run(tmp_path / "q8.gguf", tmp_path / "q4.gguf", "Q4_0", "--allow-requantize")
    assert file.tensors["blk.0.attn_q.weight"].type == T.Q4_0


def test_does_not_overwrite_its_input(model, capsys):
    before = model.read_bytes()
    assert main(["quantize", str(model), str(model), "Q8_0"]) == 2
    assert model.read_bytes() == before and "is the input itself" in capsys.readouterr().err


def test_not_a_number_is_refused(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    small_keys(writer)
    tensors = small_tensors()
    tensors["blk.1.attn_k.weight"][3, 4] = np.inf
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert main(["quantize", str(path), str(tmp_path / "q.gguf"), "Q8_0"]) == 2
    assert "blk.1.attn_k.weight: value inf" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


class TestImportance:
    """Column importances of one expert each: its important columns come out better."""

    def importance(self, path):
        rng = np.random.default_rng(0)
        up = np.exp(3 * rng.standard_normal((EXPERTS, D))).astype(np.float32)
        counts = np.array([10, 0, 5, 7], np.float32)
        entries = {"blk.0.ffn_up_exps.weight": Entry(up * counts[:, None], counts)}
        save(path, Importance(str(path), entries, ["text.txt"], 4, 512))
        return up

    def test_lowers_the_weighted_error(self, model, tmp_path):
        w = self.importance(tmp_path / "im.gguf")
        plain = run(model, tmp_path / "a.gguf", "Q4_0")
        tuned = run(model, tmp_path / "b.gguf", "Q4_0", "--imatrix", str(tmp_path / "im.gguf"))
        name = "blk.0.ffn_up_exps.weight"
        x = small_tensors()[name]
        error = [(w[:, None] * (values(f, name) - x) ** 2).sum((1, 2)) for f in (plain, tuned)]
        assert (error[1] < error[0])[[0, 2, 3]].all()
        assert np.isfinite(values(tuned, name)).all()
        other = "blk.1.ffn_up_exps.weight"
        assert np.array_equal(values(plain, other), values(tuned, other))
        assert tuned.metadata["quantize.imatrix.entries_count"] == 1
        assert tuned.metadata["quantize.imatrix.dataset"] == "text.txt"

    def test_of_another_model(self, model, tmp_path, capsys):
        entry = Entry(np.ones((EXPERTS, F), np.float32), np.ones(EXPERTS, np.float32))
        save(tmp_path / "im.gguf", Importance("", {"blk.0.ffn_up_exps.weight": entry}, [], 1, 512))
        flags = ["--imatrix", str(tmp_path / "im.gguf")]
        assert main(["quantize", str(model), str(tmp_path / "q.gguf"), "Q4_0", *flags]) == 2
        assert "blk.0.ffn_up_exps.weight" in capsys.readouterr().err
