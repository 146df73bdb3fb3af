"""Hugging Face checkpoints to GGUF: the model stays the same, for every architecture."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize

from dali_gguf.cli import main
from dali_gguf.convert.gguf_typed import read_typed
from dali_gguf.engine import Engine
from dali_gguf.gguf_file import GGUFFile
from tests.numpy_device import NumpyDevice
from tests.tiny_checkpoints import (
    edit_config,
    edit_weights,
    fuse_experts,
    write_checkpoint,
    write_sentencepiece,
)
from tests.vocabulary_file import N_VOCAB

SAME = (
    "llama", "llama3-rope", "llama-linear", "mixtral", "qwen2", "qwen2-yarn", "qwen3", "qwen2moe",
    "qwen3moe",
    "olmoe", "deepseek2-lite", "deepseek2-groups", "deepseek3", "gpt-oss",
)  # fmt: skip
IDS = np.random.default_rng(3).integers(0, N_VOCAB, 24).tolist()


def convert(folder, out, *flags) -> GGUFFile:
    assert main(["convert", str(folder), "-o", str(out), *flags]) == 0
    return GGUFFile.open(out)


def keys(file: GGUFFile) -> dict:
    return read_typed(file.paths[0])


def values(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    return dequantize(tensor.data.reshape(-1, tensor.row_bytes), tensor.type).reshape(tensor.shape)


def engine_logits(path) -> np.ndarray:
    with Engine(path, n_ctx=64, n_batch=32, device=NumpyDevice(), kv_type="f32") as engine:
        return engine.logits(IDS)


def assert_same_model(path, model) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    assert np.abs(engine_logits(path) - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", SAME)
def test_f32_gives_transformers_logits(kind, tmp_path):
    model = write_checkpoint(tmp_path, kind)
    file = convert(tmp_path, tmp_path / "m.gguf", "--type", "F32")
    assert {t.type for t in file.tensors.values()} == {T.F32}
    assert_same_model(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe", "qwen2moe"])
def test_fused_experts_give_the_same_file(kind, tmp_path):
    write_checkpoint(tmp_path, kind)
    single = convert(tmp_path, tmp_path / "single.gguf")
    edit_weights(tmp_path, fuse_experts)
    fused = convert(tmp_path, tmp_path / "fused.gguf")
    assert list(single.tensors) == list(fused.tensors)
    assert all(np.array_equal(t.data, fused.tensors[n].data) for n, t in single.tensors.items())


def test_old_config_spelling_gives_the_same_keys(tmp_path):
    """rope_scaling with rope_theta beside it, as hub files before transformers 5 have it."""
    write_checkpoint(tmp_path, "qwen2-yarn")
    new = keys(convert(tmp_path, tmp_path / "new.gguf"))
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    edit_config(tmp_path, rope_parameters=None, rope_scaling=rope, rope_theta=theta)
    assert keys(convert(tmp_path, tmp_path / "old.gguf")) == new


def test_bfloat16_stays_bit_for_bit(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3moe", "bfloat16")
    file = convert(tmp_path, tmp_path / "m.gguf")
    assert file.metadata["general.file_type"] == 32
    norm, router = file.tensors["blk.0.attn_norm.weight"], file.tensors["blk.0.ffn_gate_inp.weight"]
    assert norm.type == router.type == T.F32
    up = file.tensors["blk.1.ffn_up_exps.weight"]
    assert up.type == T.BF16 and up.shape == (8, 32, 64)
    weight = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"].numpy()[:, 32:]
    assert np.array_equal(values(file, "blk.1.ffn_up_exps.weight"), weight)


def test_sharded_checkpoint_is_the_same_file(tmp_path):
    model = write_checkpoint(tmp_path, "olmoe", "bfloat16")
    one = convert(tmp_path, tmp_path / "one.gguf", "--name", "x")
    (tmp_path / "s").mkdir()
    model.bfloat16().save_pretrained(tmp_path / "s", max_shard_size="200KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "s" / name).write_bytes((tmp_path / name).read_bytes())
    assert len(list((tmp_path / "s").glob("*.safetensors"))) > 2
    shards = convert(tmp_path / "s", tmp_path / "many.gguf", "--name", "x")
    assert keys(one) == keys(shards)
    assert all(np.array_equal(t.data, shards.tensors[n].data) for n, t in one.tensors.items())


def test_gpt_oss_mxfp4_is_kept_bit_for_bit(tmp_path):
    """The hub's blocks: low nibble first, weights 2 i and 2 i + 1 in a byte, gate and up rows
    alternating."""
    write_checkpoint(tmp_path, "gpt-oss", "bfloat16")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8, 128, 2, 16), dtype=np.uint8)
    scales = rng.integers(118, 126, (8, 128, 2), dtype=np.uint8)

    def pack(weights):
        for i in range(4):
            p = f"model.layers.{i}.mlp.experts."
            del weights[p + "gate_up_proj"]
            weights |= {p + "gate_up_proj_blocks": blocks, p + "gate_up_proj_scales": scales}
        return weights

    edit_weights_torch(tmp_path, pack)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    file = convert(tmp_path, tmp_path / "m.gguf", "--type", "Q8_0")
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(8, 128, 2, 32)
    expected = (fp4[codes] * np.exp2(scales[..., None].astype(np.float32) - 127)).reshape(
        8, 128, 64
    )
    assert file.tensors["blk.0.ffn_gate_exps.weight"].type == T.MXFP4
    assert np.array_equal(values(file, "blk.0.ffn_gate_exps.weight"), expected[:, ::2])
    assert np.array_equal(values(file, "blk.3.ffn_up_exps.weight"), expected[:, 1::2])
    assert file.tensors["blk.0.ffn_down_exps.weight"].type == T.Q8_0
    engine_logits(tmp_path / "m.gguf")


def edit_weights_torch(folder, change) -> None:
    """As edit_weights, for bfloat16 files with uint8 tensors added."""
    from safetensors.torch import load_file, save_file

    weights = change(load_file(folder / "model.safetensors"))
    tensors = {
        k: torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v
        for k, v in weights.items()
    }
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("scales", ["block", "tensor", "row"])
def test_fp8_is_multiplied_by_its_scales(scales, tmp_path):
    """DeepSeek-V3's form (a scale a block of 16 x 16 here), a scale a tensor, a scale a row."""
    write_checkpoint(tmp_path, "deepseek3")
    expected = {}

    def to_fp8(weights):
        out = {}
        for name, w in weights.items():
            if w.ndim < 2 or "embed" in name or "lm_head" in name or "mlp.gate.weight" in name:
                out[name] = w
                continue
            rows, cols = w.shape
            blocks = {
                "block": (-(-rows // 16), -(-cols // 16)),
                "tensor": (1, 1),
                "row": (rows, 1),
            }[scales]
            scale = torch.rand(blocks) * 0.01 + 0.005
            wide = scale.repeat_interleave(-(-rows // blocks[0]), 0)[:rows]
            wide = wide.repeat_interleave(-(-cols // blocks[1]), 1)[:, :cols]
            out[name] = (w / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[name + ("_scale_inv" if scales == "block" else "_scale")] = scale.reshape(
                () if scales == "tensor" else blocks
            )
            expected[name] = (out[name].float() * wide).numpy()
        return out

    edit_weights_torch(tmp_path, to_fp8)
    edit_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]}
    )
    file = convert(tmp_path, tmp_path / "m.gguf", "--type", "F32")
    name = "model.layers.{}.mlp.experts.3.down_proj.weight"
    assert np.array_equal(values(file, "blk.1.ffn_down_exps.weight")[3], expected[name.format(1)])
    output = "model.layers.0.self_attn.o_proj.weight"
    assert np.array_equal(values(file, "blk.0.attn_output.weight"), expected[output])
    kv = expected["model.layers.2.self_attn.kv_b_proj.weight"].reshape(4, 64, 32)
    assert np.array_equal(values(file, "blk.2.attn_k_b.weight"), kv[:, :32].swapaxes(1, 2))
    assert np.array_equal(values(file, "blk.2.attn_v_b.weight"), kv[:, 32:])


def test_quantized_in_one_step_equals_two_steps(tmp_path):
    write_checkpoint(tmp_path, "qwen3moe", "bfloat16")
    one = convert(tmp_path, tmp_path / "one.gguf", "--type", "Q8_0", "--tensor-type", "attn_v=Q5_0")
    convert(tmp_path, tmp_path / "plain.gguf", "--type", "BF16")
    two = tmp_path / "two.gguf"
    assert (
        main(
            [
                "quantize",
                str(tmp_path / "plain.gguf"),
                str(two),
                "Q8_0",
                "--tensor-type",
                "attn_v=Q5_0",
            ]
        )
        == 0
    )
    assert (tmp_path / "one.gguf").stat().st_size == two.stat().st_size
    other = GGUFFile.open(two)
    assert keys(one) == keys(other)
    assert all(np.array_equal(t.data, other.tensors[n].data) for n, t in one.tensors.items())


def test_dry_run_writes_nothing(tmp_path, capsys):
    write_checkpoint(tmp_path, "mixtral")
    before = sorted(tmp_path.iterdir())
    assert (
        main(
            [
                "convert",
                str(tmp_path),
                "-o",
                str(tmp_path / "m.gguf"),
                "--type",
                "Q4_K_M",
                "--dry-run",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before
    assert "blk.2.ffn_down_exps.weight" in out and "wanted Q6_K" in out and "bits per weight" in out


def test_sentencepiece_tokenizer(tmp_path):
    write_checkpoint(tmp_path, "llama")
    write_sentencepiece(tmp_path)
    file = convert(tmp_path, tmp_path / "m.gguf")
    assert file.metadata["tokenizer.ggml.model"] == "llama"
    assert file.metadata["tokenizer.ggml.tokens"][:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert file.metadata["tokenizer.ggml.token_type"][:4].tolist() == [2, 3, 3, 6]
    assert file.metadata["tokenizer.ggml.scores"][-1] == -28
