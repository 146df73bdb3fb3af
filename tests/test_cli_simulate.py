"""simulate, trace, plan and calibrate from the command line: output and one-line errors."""

import json

import numpy as np
import pytest

from dali_gguf.cli import main
from dali_gguf.offload import balance, report, synthetic
from dali_gguf.offload import trace as traces
from dali_gguf.offload.cost import Costs
from dali_gguf.offload.hardware_profile import hardware, shape
from tests.small_gguf import EXPERTS, LAYERS, USED, write_small

D = 16


def make_trace(n_expert=16, n_used=2, n_layer=3):
    """Routing by made-up routers on inputs that change slowly from layer to layer."""
    rng = np.random.default_rng(0)
    n = 12 * 64
    common = rng.standard_normal((n, 1, D)) + np.repeat(rng.standard_normal((12, 1, D)), 64, 0)
    inputs = (common + 0.2 * rng.standard_normal((n, n_layer, D))).astype(np.float16)
    routers = np.repeat(rng.standard_normal((1, n_expert, D)), n_layer, 0).astype(np.float32)
    logits = np.einsum("tld,led->tle", inputs.astype(np.float32), routers)
    ids = np.argsort(-logits, axis=-1)[..., :n_used].astype(np.int16)
    return traces.Trace(
        ids,
        np.full(ids.shape, 0.5, np.float16),
        np.arange(13) * 64,
        np.arange(12, dtype=np.int32) // 3,
        inputs,
        routers,
        np.zeros((n_layer, n_expert), np.float32),
        n_expert,
        D,
        8,
        700,
        "made.gguf",
    )


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("sim") / "t.npz"
    traces.save(make_trace(), path)
    return str(path)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(write_small(tmp_path_factory.mktemp("plan") / "small.gguf"))


def test_table(trace_path, capsys):
    assert main(["simulate", trace_path, "--scale-to", "qwen3-30b", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated: decode, batch 2, 40% of the experts resident, RTX 3060")
    for policy in (
        "static-layers",
        "static-hot",
        "paper (greedy, w4/u1)",
        "threshold",
        "+ decayed cache",
        "+ prefetch residual",
    ):
        assert policy in out
    assert (
        main(
            [
                "simulate",
                trace_path,
                "--prefill",
                "64",
                "--vram",
                "6G",
                "--hardware",
                "rtx4090",
                "--scale-to",
                "qwen3-30b",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("simulated: prompts of 64 tokens") and "+ ring of 16" in out


def test_own_sizes_and_csv(trace_path, tmp_path, capsys):
    assert main(["simulate", trace_path, "--batch", "1", "--prefetch", "linear"]) == 0
    assert "priced as made.gguf" in capsys.readouterr().out
    path = tmp_path / "t.csv"
    rows = [
        f"{s},{layer},0,{(s * 3 + layer + k) % 6},0.5"
        for s in range(40)
        for layer in range(2)
        for k in range(2)
    ]
    path.write_text("step,layer,token,expert,weight\n" + "\n".join(rows))
    assert main(["simulate", str(path), "--batch", "1", "--scale-to", "mixtral-8x7b"]) == 0
    assert "oracle" in capsys.readouterr().err
    assert main(["simulate", str(path), "--batch", "1"]) == 2
    assert "does not say its model's sizes: add --scale-to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no trace given"),
        (["none.npz"], "trace none.npz: no such file"),
        (
            ["TRACE", "--hardware", "gtx1"],
            "hardware profile 'gtx1' is unknown: choose one of rtx3060",
        ),
        (["TRACE", "--scale-to", "gpt2"], "model size 'gpt2' is unknown"),
        (["--report", "--scale-to", "gpt2"], "model size 'gpt2' is unknown"),
        (["TRACE", "--placement", "best"], "placement 'best' is unknown: choose one of threshold"),
        (["TRACE", "--prefetch", "magic"], "prefetch 'magic' is unknown: choose one of residual"),
        (["TRACE", "--expert-cache", "arc"], "expert cache 'arc' is unknown: choose one of static"),
        (["TRACE", "--batch", "99"], "fewer than the batch of 99"),
        (["TRACE", "--prefill", "9999"], "fewer than a prompt of 9999"),
        (["TRACE", "--resident", "0"], "expected a percentage above 0"),
        (["TRACE", "--json"], "add --report"),
        (["TRACE", "--report", "-m", "a.gguf"], "give one of the two"),
        ([__file__], "not a trace file: record one with"),
        (["TRACE", "--scale-to", "qwen3-30b", "--vram", "1G"], "holds no expert of qwen3-30b"),
    ],
)
def test_errors_are_one_line(trace_path, capsys, args, message):
    assert main(["simulate", *(trace_path if a == "TRACE" else a for a in args)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.strip().count("\n") == 0


def test_a_plot_without_matplotlib_is_refused_before_the_table(trace_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", trace_path, "--plot", "out.png"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--plot needs matplotlib" in err


def test_files_to_write_need_a_folder(trace_path, model_path, tmp_path, capsys):
    for command in (["simulate", trace_path, "--plot"], ["trace", model_path, "-o"]):
        for path, expected in ((tmp_path / "none" / "x", "no folder"), (tmp_path, "is a folder")):
            with pytest.raises(SystemExit, match="2"):
                main([*command, str(path)])
            assert expected in capsys.readouterr().err


@pytest.mark.parametrize("vram", ["0", "-3G", "abc"])
def test_impossible_vram(trace_path, model_path, capsys, vram):
    for command in (["simulate", trace_path], ["plan", model_path]):
        with pytest.raises(SystemExit) as error:
            main([*command, f"--vram={vram}"])
        assert error.value.code == 2 and "is not a size above 0" in capsys.readouterr().err


KEYS = """placement_vs_optimal_mean placement_vs_optimal_worst decide_share_of_layer prefetch_recall
prefetch_recall_next_router prefetch_precision_nonresident cpu_busy gpu_busy
speedup_prefill_vs_static_layers speedup_decode_vs_static_layers speedup_decode_vs_static_hot
balance_decode balance_prefill balance_profiles balance_decode_plans_optimal
profile budget batch trace""".split()


def test_report_has_the_promised_keys(trace_path, capsys, monkeypatch):
    figures = report.placement_figures
    monkeypatch.setattr(report, "placement_figures", lambda study: figures(study, 20))
    monkeypatch.setattr(report, "PROMPT", 64)
    assert main(["simulate", trace_path, "--report", "--json", "--batch", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    for batch in (1, 8):
        key = f"hit_rate_b{batch}_40"
        KEYS.extend(key + end for end in ("", "_lru", "_lfu", "_static", "_belady"))
    assert set(KEYS) <= set(found) and found["simulated"] is True
    assert found["placement_vs_optimal_mean_greedy"] < found["placement_vs_optimal_mean"] <= 1
    assert found["hit_rate_b1_40_belady"] >= found["hit_rate_b1_40"] > 0
    assert found["prefetch_recall"] > found["prefetch_recall_frequency"]
    assert main(["simulate", trace_path, "--report", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated on RTX 3060") and "of Belady" in out
    assert "balance of CPU and GPU+link, decode" in out and "shortest makespan" in out
    assert {r["profile"] for r in found["balance_profiles"]} >= {"rtx3060-12g", "rtx4090"}


def test_balance_of_a_plan():
    """Two misses, 30 us each on the CPU or 10 after a copy of 30, one resident of 10: the shortest
    makespan is 40, with one copy, and the CPU is done after 30."""
    costs = Costs(np.array([0.0, 30.0]), np.array([0.0, 10.0]), 30.0)
    one = np.ones(1, np.int64)
    assert balance.of_plan(np.ones(2, np.int64), one, costs, "static-hot") == 10 / 60
    assert balance.of_plan(np.ones(2, np.int64), one, costs, "all-gpu") is None
    both = [(np.array([1, 1, 1]), np.array([0, 0, 1], np.uint8))]
    assert balance.of_policy(both, costs, "optimal") == 30 / 40


def test_synthetic_routing_prefills_faster_than_streaming():
    """The known figure of 1.87x on this profile; the routing is made up, so within 10 %."""
    trace = make_trace()
    study = report.Study(*traces.split(trace), hardware("rtx3060-12g"), shape("qwen3-30b"), 0.4, 2)
    runs = report.prefill_run(*report.synthetic_prompts(study))
    assert report.over_streaming(runs) == pytest.approx(1.87, rel=0.1)
    made, predicted = synthetic.qwen3_like(2, 6, 64)
    recall = (made.ids[:, :, :, None] == predicted[:, :, None, :]).any(-1).mean()
    assert 0.8 < recall < 0.9


def test_plot(trace_path, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["simulate", trace_path, "--scale-to", "qwen3-30b", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_plan(model_path, tmp_path, capsys):
    path = tmp_path / "t.npz"
    trace = make_trace(EXPERTS, USED, LAYERS)
    traces.save(trace, path)
    assert (
        main(
            [
                "plan",
                model_path,
                "--vram",
                "1M",
                "-c",
                "32",
                "-b",
                "8",
                "--ram",
                "2G",
                "--trace",
                str(path),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "GPU memory 1M: weights" in out and "(--ram 2.0G)" in out
    assert "hits with" in out and "belady" in out and "dali-gguf calibrate makes one" in out
    assert main(["plan", model_path, "--trace", str(path), "--vram", "1K"]) == 2
    assert "--vram 1M is too small" in capsys.readouterr().err
    traces.save(make_trace(), path)
    assert main(["plan", model_path, "--trace", str(path)]) == 2
    assert "trace of another model: it has 3 layers of 16 experts" in capsys.readouterr().err


def test_calibrate_then_plan(model_path, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DALI_CACHE", str(tmp_path))
    assert main(["calibrate", model_path, "--device", "cpu"]) == 0
    first = capsys.readouterr().out
    assert "on the CPU, us" in first and "kept in" in first
    assert main(["calibrate", model_path, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("stored\n")
    assert main(["plan", model_path, "-c", "32"]) == 0
    assert "tokens/s predicted on the CPU alone" in capsys.readouterr().out
    (profile,) = (tmp_path / "costs").glob("*.json")
    profile.write_text("{")
    assert main(["calibrate", model_path, "--device", "cpu"]) == 0
    assert "measuring again" in capsys.readouterr().err


def test_trace_command(model_path, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("some words to read " * 80)
    out = tmp_path / "t.trace"  # the name as it is given
    assert (
        main(["trace", model_path, "-f", str(text), "-o", str(out), "--length", "32", "--counts"])
        == 0
    )
    trace = traces.load(out)
    assert trace.n_layer == LAYERS and len(trace.inputs) == len(trace.ids)
    assert main(["plan", model_path, "-c", "32"]) == 0
    assert "(stored counts)" in capsys.readouterr().out
    assert main(["trace", model_path, "-f", str(tmp_path / "no.txt"), "-o", str(out)]) == 2
    assert "no.txt: No such file" in capsys.readouterr().err
    assert main(["trace", model_path]) == 2
