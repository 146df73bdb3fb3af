"""`dali-gguf simulate`: replay a routing trace on a hardware profile. All of it is simulated."""

import argparse
import json
import sys
from pathlib import Path

from dali_gguf.cli.arguments import number, output_file, size, whole
from dali_gguf.errors import InputError
from dali_gguf.offload import (
    balance, cache, hardware_profile, placement, plot, predict_trace, prefetch,
)
from dali_gguf.offload import simulate as sim
from dali_gguf.offload import trace as traces
from dali_gguf.offload.report import GOALS, Study, full_report, table

HELP = "replay a routing trace on a hardware profile"
COLUMNS = (
    ("tok/s", "tokens_per_s", "{:9.1f}"),
    ("x", "", "{:6.2f}"),
    ("hit", "hit_rate", "{:6.3f}"),
    ("by token", "token_hit_rate", "{:9.3f}"),
    ("prefetch", "prefetch_accuracy", "{:9.2f}"),
    ("late", "prefetch_late", "{:6.2f}"),
    ("GB/step", "gigabytes_per_step", "{:8.2f}"),
    ("link", "link_share", "{:6.2f}"),
    ("CPU|GPU in layers of both", "", "{:>12}"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        help="t.npz of dali-gguf trace, or a .csv; without one, --report records "
        "the embedded model on a text that comes with the package",
    )
    add(
        "--hardware",
        default="rtx3060-12g",
        metavar="NAME",
        help=f"profile: {', '.join(hardware_profile.names())}, or a .toml file (rtx3060-12g)",
    )
    add(
        "--scale-to",
        default=None,
        metavar="MODEL",
        help="price the routing with a large model's "
        "sizes: qwen3-30b, deepseek-v2-lite, gpt-oss-120b, mixtral-8x7b",
    )
    add("--vram", type=size, metavar="SIZE", help="GPU memory, like 6G; default: --resident")
    add(
        "--resident",
        type=number(0, 100),
        default=40.0,
        metavar="PERCENT",
        help="share of the experts in GPU memory, where --vram is not given (40)",
    )
    add("--batch", type=whole(1), default=8, metavar="N", help="sequences decoded together (8)")
    add("--prefill", type=whole(1), metavar="N", help="prompts of N tokens instead of decoding")
    add("--placement", default="threshold", help=", ".join(placement.POLICIES))
    add("--prefetch", default="residual", help=", ".join(prefetch.PREDICTORS))
    add("--prefetch-count", type=whole(0), default=2, metavar="N", help="copies a layer (2)")
    add("--expert-cache", default="decayed", help=", ".join(cache.POLICIES))
    add("--report", action="store_true", help="the policies' figures against their goals")
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "--plot",
        type=output_file,
        metavar="PNG",
        help="draw a layer's timeline, hits and speed against VRAM",
    )
    add("-m", "--model", metavar="MODEL", help="with --report and no trace: the model to record")


def run(args: argparse.Namespace) -> int:
    check_names(args)
    machine = hardware_profile.hardware(args.hardware)
    scale = args.scale_to or ("qwen3-30b" if args.report else None)
    scaled = hardware_profile.shape(scale) if scale else None
    recorded = traces.load(args.trace) if args.trace else recorded_trace(args)
    model = scaled or sim.shape_of(recorded)
    share = args.resident / 100
    if args.vram is not None:
        share = sim.share_of_budget(machine, model, args.vram, args.batch)
    calibration, evaluation = traces.split(recorded)
    study = Study(calibration, evaluation, machine, model, share, args.batch)
    if args.report:
        return report(args, study)
    predicted = predictions(args, study)
    print_table(args, study, predicted)
    if args.plot:
        plot.draw(study, chosen_policies(args), predicted, Path(args.plot))
        print(f"drawn (simulated): {args.plot}")
    return 0


def check_names(args: argparse.Namespace) -> None:
    """InputError for an unknown policy, before anything is read."""
    placement.policy_code(args.placement)
    cache.settings(args.expert_cache)
    if args.prefetch not in prefetch.PREDICTORS:
        raise InputError(
            f"prefetch {args.prefetch!r} is unknown: choose one of {', '.join(prefetch.PREDICTORS)}"
        )
    if not args.resident:
        raise InputError("--resident 0 leaves nothing on the GPU: expected a percentage above 0")
    if args.json and not args.report:
        raise InputError("--json prints the report: add --report")
    if args.model and args.trace:
        raise InputError("-m is for a report without a trace: give one of the two")
    if args.plot:
        plot.check()


def recorded_trace(args: argparse.Namespace) -> traces.Trace:
    """The embedded model (or -m) reading the text that comes with the package."""
    if not args.report:
        raise InputError(
            "no trace given: record one with dali-gguf trace -o t.npz, or add --report"
        )
    from dali_gguf.engine import Engine
    from dali_gguf.offload.record import REPORT_TEXT, record

    say("recording a trace")
    with Engine(args.model, n_ctx=512) as engine:
        return record(engine, REPORT_TEXT.read_text(encoding="utf-8"))


def say(text: str) -> None:
    print(f"simulate: {text} ..", file=sys.stderr, flush=True)


def chosen_policies(args: argparse.Namespace) -> list[sim.Policy]:
    if args.prefill:
        return sim.prefill_policies()
    return sim.policies(args.expert_cache, args.placement, args.prefetch, args.prefetch_count)


def predictions(args: argparse.Namespace, study: Study) -> dict:
    """Predicted ids of the predictors the policies use. A trace without inputs has none to offer:
    then those policies run without prefetch, and the table says so."""
    names = {p.predictor for p in chosen_policies(args)} - {"none"}
    if len(study.evaluation.inputs) != len(study.evaluation.ids) and names - {"frequency"}:
        print(
            "the trace has no router inputs: prefetches below know the future (oracle)",
            file=sys.stderr,
        )
        return {}
    return {
        name: predict_trace.predicted_ids(name, study.calibration, study.evaluation)
        for name in names
    }


def print_table(args: argparse.Namespace, study: Study, predicted: dict) -> None:
    batch = args.prefill or args.batch
    what = f"prompts of {batch} tokens" if args.prefill else f"decode, batch {batch}"
    study = Study(
        study.calibration, study.evaluation, study.machine, study.model, study.share, batch
    )
    results = table(study, chosen_policies(args), predicted, bool(args.prefill))
    print(
        f"simulated: {what}, {study.share:.0%} of the experts resident, {study.machine.title}, "
        f"priced as {study.model.name}"
    )
    print(f"{'policy':28}" + "".join(f"{name:>{max(len(name) + 1, 6)}}" for name, _, _ in COLUMNS))
    for r in results:
        print(row(r, results[0].tokens_per_s))
    print(
        "simulated; x: over the first row; GB over the link; shares of time are of the whole step"
    )


def row(r: sim.Result, base: float) -> str:
    cells = []
    for name, field, form in COLUMNS:
        value = getattr(r, field) if field else None
        if name == "x":
            value = r.tokens_per_s / base
        elif value is None:
            value = f"{r.cpu_both:.2f} | {r.gpu_both:.2f}"
        cells.append(form.format(value).rjust(max(len(name) + 1, 6)))
    return f"{r.policy:28}" + "".join(cells)


def report(args: argparse.Namespace, study: Study) -> int:
    figures = full_report(study, say)
    if args.json:
        print(json.dumps(figures, indent=1))
        return 0
    print(
        f"simulated on {study.machine.title}, {study.share:.0%} of the experts resident, batch "
        f"{study.batch}, priced as {study.model.name}; routing of {figures['trace']}, "
        f"{figures['trace_tokens']} tokens"
    )
    print(f"{'figure':58}{'goal':>8}{'found':>8}")
    for key, (goal, text) in GOALS.items():
        mark = "" if figures[key] >= goal else "  below the goal"
        if key == "balance_decode" and mark:
            mark += f"; single steps of the optimum {figures['balance_decode_plans_optimal']:.3f}"
        print(f"{text:58}{goal:8.3f}{figures[key]:8.3f}{mark}")
    print_details(figures)
    return 0


def print_details(f: dict) -> None:
    print(
        f"the paper's greedy: {f['placement_vs_optimal_mean_greedy']:.3f} mean, "
        f"{f['placement_vs_optimal_worst_greedy']:.3f} worst; threshold moving residents only for "
        f"10 %: {f['placement_vs_optimal_mean_with_margin']:.3f}, "
        f"{f['placement_vs_optimal_worst_with_margin']:.3f}; {f['placement_instances']} instances"
    )
    print(
        f"deciding: {f['decide_us_128']:.1f} us for 128 experts (measured here), "
        f"{f['decide_share_of_layer']:.2%} of a simulated layer"
    )
    print(
        "recall "
        + ", ".join(
            f"{k} {f['prefetch_recall_' + k.replace('-', '_')]:.3f}"
            for k in ("linear", "residual", "next-router", "frequency")
        )
        + "; best predictor above the last two in "
        f"every layer: {'yes' if f['prefetch_above_others_in_every_layer'] else 'no'}"
    )
    for batch, kind in ((1, "by expert"), (8, "by token")):
        key = f"hit_rate_b{batch}_40"
        others = ", ".join(
            f"{n} {f[f'{key}_{n}']:.3f}"
            for n in ("lru", "lfu", "lfru", "static", "paper", "belady")
        )
        print(
            f"hits batch {batch}, {kind}: {f[key]:.3f}; {others}; "
            f"{f[key + '_share_of_belady']:.1%} of Belady"
        )
    print(
        f"decode: CPU busy {f['cpu_busy']:.2f}, GPU and link {f['gpu_busy']:.2f} of layers where "
        f"both work; prefill {f['cpu_busy_prefill']:.2f}, {f['gpu_busy_prefill']:.2f}"
    )
    print("\n".join(balance.lines(f)))
    print(
        f"prefill is on {f['prefill_trace']}; on the trace's own routing "
        f"{f['speedup_prefill_vs_static_layers_own_trace']:.2f}x"
    )
    for part in ("decode", "prefill"):
        base = f[part][0]["tokens_per_s"]
        print(
            f"{part}, simulated tokens/s: "
            + "; ".join(
                f"{r['policy']} {r['tokens_per_s']:.0f} ({r['tokens_per_s'] / base:.2f}x)"
                for r in f[part]
            )
        )
