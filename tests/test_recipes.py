"""Which tensor gets which type: what llama-quantize (ggml 0.25.3) chose, for four models and all
mixtures.

tests/data/recipes.json: for each model its facts and, for each mixture, the types that a kind of
tensor has in the layers, run-length encoded. The models are dense, dense with tied embeddings, with
8 experts and with 4; all matrices are 256 wide.
"""

import json
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as T

from dali_gguf.convert.gguf_output import TensorInfo
from dali_gguf.convert.recipes import (
    MIXTURES,
    ModelFacts,
    Wishes,
    choose_types,
    may_quantize,
    parse_mixture,
    parse_type,
    tensor_order,
)
from dali_gguf.errors import InputError

DATA = json.loads((Path(__file__).parent / "data" / "recipes.json").read_text())
DENSE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def matrices(model: dict) -> list[TensorInfo]:
    _, n_layer, n_expert, _ = model["facts"]
    infos = [
        TensorInfo("token_embd.weight", (259, 256), T.F16),
        TensorInfo("output_norm.weight", (256,), T.F32),
    ]
    if not model["tied"]:
        infos.append(TensorInfo("output.weight", (259, 256), T.F16))
    for i in range(n_layer):
        for name in DENSE:
            experts = n_expert and name.startswith("ffn")
            shape = (n_expert, 256, 256) if experts else (256, 256)
            infos.append(
                TensorInfo(f"blk.{i}.{name}{'_exps' if experts else ''}.weight", shape, T.F16)
            )
    return infos


def unpacked(text: str) -> list[str]:
    return [kind for run in text.split() for kind in [run.split("*")[0]] * int(run.split("*")[1])]


@pytest.mark.parametrize("mixture", [m for m in MIXTURES if m not in ("F32", "F16", "BF16")])
@pytest.mark.parametrize("model", DATA)
def test_same_types_as_llama_quantize(model, mixture):
    model = DATA[model]
    expected = {kind: unpacked(text) for kind, text in model["types"][mixture].items()}
    chosen = choose_types(mixture, ModelFacts(*model["facts"]), Wishes(), matrices(model))
    assert len(chosen) == len(matrices(model))
    for choice in sorted(chosen, key=lambda c: tensor_order(c.info.name)):
        layer, name = tensor_order(choice.info.name)
        if "norm" in name:
            assert choice.info.type == T.F32
        else:
            kind = name if layer < 0 else name.split(".", 2)[2]
            assert choice.info.type.name == expected[kind][max(layer, 0)], name


FACTS = ModelFacts("llama", 4, 4, 2)


def one(name: str, shape, mixture: str, wishes: Wishes = Wishes(), facts: ModelFacts = FACTS):
    (choice,) = choose_types(mixture, facts, wishes, [TensorInfo(name, shape, T.F16)])
    return choice.info.type, choice.wanted


@pytest.mark.parametrize(
    "mixture, name, cols, expected",
    [
        ("Q4_K_S", "blk.2.attn_q.weight", 128, T.Q5_0),
        ("Q5_K_S", "blk.2.attn_q.weight", 96, T.Q5_1),
        ("Q6_K", "blk.2.attn_q.weight", 64, T.Q8_0),
        ("Q2_K", "blk.2.attn_q.weight", 32, T.Q4_0),
        ("IQ4_XS", "blk.2.attn_q.weight", 32, T.IQ4_NL),
        ("Q4_K_M", "blk.2.attn_q.weight", 40, T.F16),
        ("Q4_0", "blk.2.attn_q.weight", 48, T.F16),
    ],
)
def test_rows_that_do_not_fit_fall_back(mixture, name, cols, expected):
    type_, wanted = one(name, (8, cols), mixture)
    assert type_ == expected and wanted == MIXTURES[mixture][1]


def test_wishes():
    shape = (8, 256)
    attn_q, output = "blk.1.attn_q.weight", "output.weight"
    assert (
        one(attn_q, shape, "Q4_K_M", Wishes(overrides=(("attn_q", T.Q8_0), ("attn", T.F32))))[0]
        == T.Q8_0
    )
    assert one(attn_q, shape, "Q4_K_M", Wishes(overrides=((r"blk\.2\.", T.Q8_0),)))[0] == T.Q4_K
    assert one(output, shape, "Q4_K_M", Wishes(output=T.BF16))[0] == T.BF16
    assert one("token_embd.weight", shape, "Q4_K_M", Wishes(embedding=T.Q3_K))[0] == T.Q3_K
    assert one("blk.2.ffn_down.weight", shape, "Q4_K_M", Wishes(pure=True))[0] == T.Q4_K
    assert one("blk.2.ffn_down.weight", shape, "Q4_K_M")[0] == T.Q6_K


def test_imatrix_changes_the_first_layers():
    facts = ModelFacts("llama", 16, 0, 1)
    down = "blk.0.ffn_down.weight"
    assert one(down, (8, 256), "Q4_0", Wishes(imatrix=True), facts)[0] == T.Q4_1
    assert one(down, (8, 256), "IQ4_XS", Wishes(), facts)[0] == T.Q5_K
    assert one(down, (8, 256), "IQ4_XS", Wishes(imatrix=True), facts)[0] == T.IQ4_XS


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("blk.0.attn_q.weight", (8, 8), True),
        ("blk.0.ffn_gate_inp.weight", (8, 8), False),
        ("blk.0.ffn_gate_inp_shexp.weight", (1, 8), False),
        ("blk.0.attn_norm.weight", (8,), False),
        ("blk.0.ffn_down_exps.bias", (4, 8), False),
        ("blk.0.attn_k_b.weight", (4, 8, 8), True),
        ("blk.0.exp_probs_b.bias", (8,), False),
    ],
)
def test_what_is_never_quantized(name, shape, expected):
    assert may_quantize(name, shape) == expected


def test_names():
    assert parse_mixture("q4_k") == "Q4_K_M" and parse_mixture("mxfp4") == "MXFP4_MOE"
    assert parse_type("q6_k") == T.Q6_K
    for parse in (parse_mixture, parse_type):
        with pytest.raises(InputError, match="Q7_X"):
            parse("Q7_X")
