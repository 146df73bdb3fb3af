"""Damaged, incomplete and foreign checkpoints: one line that names the thing, exit 2, no file."""

import json

import numpy as np
import pytest

from dali_gguf.cli import main
from tests.tiny_checkpoints import edit_config, edit_weights, write_checkpoint


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    for kind in ("qwen3moe", "llama"):
        write_checkpoint(folder / kind, kind)
    return folder


@pytest.fixture
def folder(checkpoints, tmp_path):
    """A copy of the qwen3moe checkpoint that a test may damage."""
    for path in (checkpoints / "qwen3moe").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refused(folder, capsys, *flags) -> str:
    """The one line that convert ends with; nothing stands under the final name, no rest either."""
    assert main(["convert", str(folder), "-o", str(folder / "out.gguf"), *flags]) == 2
    captured = capsys.readouterr()
    (line,) = [text for text in captured.err.splitlines() if text.startswith("dali-gguf:")]
    assert not (folder / "out.gguf").exists() and not list(folder.glob("*.part"))
    return line


def test_no_config(folder, capsys):
    (folder / "config.json").unlink()
    assert "no config.json" in refused(folder, capsys)


def test_config_is_no_json(folder, capsys):
    (folder / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in refused(folder, capsys)


def test_unknown_architecture(folder, capsys):
    edit_config(folder, architectures=["FooForCausalLM"])
    line = refused(folder, capsys)
    assert "FooForCausalLM" in line and "Qwen3MoeForCausalLM" in line


def test_number_of_experts_under_no_known_name(folder, capsys):
    edit_config(folder, num_local_experts=None, num_experts=None, n_routed_experts=None)
    line = refused(folder, capsys)
    assert "num_local_experts or num_experts or n_routed_experts is missing" in line


@pytest.mark.parametrize(
    "key, value", [("hidden_size", "64"), ("num_hidden_layers", 0), ("vocab_size", -1)]
)
def test_size_of_the_wrong_kind(key, value, folder, capsys):
    edit_config(folder, **{key: value})
    line = refused(folder, capsys)
    assert key in line and repr(value) in line


@pytest.mark.parametrize(
    "method, name",
    [("gptq", "GPTQ"), ("awq", "AWQ"), ("bitsandbytes", "bitsandbytes"), ("new-one", "new-one")],
)
def test_quantized_checkpoint_is_refused_by_name(method, name, folder, capsys):
    edit_config(folder, quantization_config={"quant_method": method})
    assert f"quantized with {name}" in refused(folder, capsys)


def test_missing_tensor(folder, capsys):
    edit_weights(
        folder,
        lambda w: {k: v for k, v in w.items() if k != "model.layers.1.self_attn.k_norm.weight"},
    )
    assert "no tensor for blk.1.attn_k_norm.weight" in refused(folder, capsys)


def test_missing_expert(folder, capsys):
    edit_weights(
        folder, lambda w: {k: v for k, v in w.items() if "2.mlp.experts.5.up_proj" not in k}
    )
    line = refused(folder, capsys)
    assert "blk.2.ffn_up_exps.weight has 7 experts" in line and "expert 5 is missing" in line


def test_tensor_of_unexpected_shape(folder, capsys):
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_weights(folder, lambda w: w | {name: w[name][:, :64]})
    assert "blk.0.attn_output.weight is [64, 64], config.json says [64, 128]" in refused(
        folder, capsys
    )


def test_tensor_without_a_place(folder, capsys):
    edit_weights(
        folder, lambda w: w | {"model.layers.0.surprise.weight": np.ones((2, 2), np.float32)}
    )
    assert "model.layers.0.surprise.weight" in refused(folder, capsys)


def test_weights_that_are_integers(folder, capsys):
    name = "model.layers.0.self_attn.o_proj.weight"
    edit_weights(folder, lambda w: w | {name: w[name].astype(np.int32)})
    line = refused(folder, capsys)
    assert name in line and "I32" in line


def test_not_a_number_in_the_weights(folder, capsys):
    def poison(weights):
        weights["model.layers.1.mlp.experts.3.up_proj.weight"][5, 7] = np.nan
        return weights

    edit_weights(folder, poison)
    line = refused(folder, capsys, "--type", "Q8_0")
    assert "blk.1.ffn_up_exps.weight" in line and "nan" in line


def test_beyond_half_precision(folder, capsys):
    def grow(weights):
        weights["lm_head.weight"][0, 0] = 1e6
        return weights

    edit_weights(folder, grow)
    line = refused(folder, capsys, "--type", "F16")
    assert "output.weight" in line and "65504" in line


def test_missing_shard(folder, capsys):
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors" in refused(folder, capsys)


def test_shards_without_an_index(folder, capsys):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    assert "1 of 2 shards" in refused(folder, capsys)


def test_no_weights(folder, capsys):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no safetensors files" in refused(folder, capsys)


def test_cut_off_weights(folder, capsys):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "cut off" in refused(folder, capsys)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 40, (40).to_bytes(8, "little") + b"[" * 40])
def test_damaged_weights_header(raw, folder, capsys):
    (folder / "model.safetensors").write_bytes(raw)
    assert "safetensors" in refused(folder, capsys)


def test_no_tokenizer(folder, capsys):
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused(folder, capsys)


def test_unknown_pre_tokenizer_and_the_way_out(folder, capsys):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    assert "--pre" in refused(folder, capsys)
    assert main(["convert", str(folder), "-o", str(folder / "out.gguf"), "--pre", "qwen2"]) == 0


def test_tokenizer_of_another_model(folder, capsys):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append({"id": 999, "content": "<x>", "special": True})
    path.write_text(json.dumps(tokenizer))
    assert "a token 999, config.json says vocab_size 288" in refused(folder, capsys)


def test_unknown_type(folder, capsys):
    assert "Q9_K" in refused(folder, capsys, "--type", "Q9_K")


def test_no_such_folder(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "none")]) == 2
    assert "none does not exist" in capsys.readouterr().err


def test_output_folder_does_not_exist(folder, capsys):
    assert main(["convert", str(folder), "-o", str(folder / "no" / "out.gguf")]) == 2
    assert "does not exist; create it first" in capsys.readouterr().err


def test_output_is_an_input(folder, capsys):
    before = (folder / "model.safetensors").read_bytes()
    assert main(["convert", str(folder), "-o", str(folder / "model.safetensors")]) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before
