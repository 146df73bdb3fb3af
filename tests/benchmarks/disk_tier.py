"""Models larger than memory: dali-gguf and llama.cpp in the same memory group, from a cold cache.

    python tests/benchmarks/disk_tier.py MODEL.gguf --peer LLAMA_CPP_BIN [--part 25 50 75 110]
        [--read-ahead own 128] [--prefill 512] [--tokens 96] [--greedy] [--json FILE]

Needs root (memory groups, dropping the page cache, a loop device). MODEL: see disk_model.py;
--greedy for its sticky kind, where both programs have to decode the same text. read-ahead 128: the
file is seen by llama.cpp through a read-only direct-I/O loop device with read_ahead_kb 128, because
the window of the disk itself is left alone. The bound is 1 / max(compute, missed bytes /
direct-read ceiling): compute from a run without limit, missed bytes and ceiling from the limited
run itself. "Side by side" is the same with compute and ceiling measured while both are at work.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.disk_child import PROMPT  # noqa: E402
from tests.memory_group import MemoryGroup  # noqa: E402

CHILD = Path(__file__).with_name("disk_child.py")
NO_LIMIT = 1 << 60


# ---- our side


def ours(model: Path, limit: int, args, prefill: int) -> dict:
    command = [sys.executable, str(CHILD), str(model)]
    for name, value in (("tokens", args.tokens), ("warm", args.warm), ("prefill", prefill)):
        command += [f"--{name}", str(value)]
    command += ["--prefetch", args.prefetch, *["--greedy"] * args.greedy]
    model.with_suffix(".dali.gguf").unlink(missing_ok=True)  # what an earlier run learned
    drop_cache()
    with MemoryGroup("bench", limit) as group:
        done = group.run(command, capture_output=True, text=True)
        peak, kills = group.peak, group.kills
    if done.returncode:
        return {"error": f"exit {done.returncode}, {kills} kills: {done.stderr.strip()[-300:]}"}
    return json.loads(done.stdout.splitlines()[-1]) | {"peak": peak}


# ---- the other side


def peer(args, model: str, limit: int, prefill: int) -> dict:
    """llama-bench (random tokens), or llama-completion where the text matters."""
    run = peer_greedy if args.greedy and not prefill else peer_bench
    drop_cache()
    with MemoryGroup("bench", limit) as group:
        return run(args, model, group, prefill)


def peer_bench(args, model: str, group: MemoryGroup, prefill: int) -> dict:
    what = ["-p", str(prefill), "-n", "0"] if prefill else ["-p", "0", "-n", str(args.peer_tokens)]
    command = [f"{args.peer}/llama-bench", "-m", model, "-t", str(args.threads), *what]
    command += ["--repack", "0", "-r", "1", "-ngl", "0", "-o", "json"]
    done = run_peer(args, command, group)
    if done is None or done.returncode:
        return {"error": "no result" if done is None else done.stderr.strip()[-300:]}
    return {"rate": json.loads(done.stdout)[0]["avg_ts"]}


def peer_greedy(args, model: str, group: MemoryGroup, prefill: int) -> dict:
    words = " ".join(f"w{i - 259}" for i in PROMPT)
    command = [f"{args.peer}/llama-completion", "-m", model, "-t", str(args.threads), "-p", words]
    command += ["-n", str(args.peer_tokens), "-c", "2048", "-ngl", "0", "--no-repack", "-no-cnv"]
    command += ["--temp", "0", "--ignore-eos"]
    done = run_peer(args, command, group)
    if done is None or done.returncode:
        return {"error": "no result" if done is None else done.stderr.strip()[-300:]}
    found = re.search(r"(?<!prompt )eval time.*?([\d.]+) tokens per second", done.stderr)
    return {"rate": float(found[1])} if found else {"error": done.stderr[-300:]}


def run_peer(args, command: list[str], group: MemoryGroup) -> subprocess.CompletedProcess | None:
    env = os.environ | {"LD_LIBRARY_PATH": args.peer}
    try:
        return group.run(command, capture_output=True, text=True, env=env, timeout=args.timeout)
    except subprocess.TimeoutExpired:
        return None


# ---- the machine


def drop_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def own_read_ahead(model: Path) -> int | None:
    """read_ahead_kb of the disk that the model lies on."""
    number = os.stat(model).st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    for place in (folder, folder.parent):
        if (place / "queue/read_ahead_kb").exists():
            return int((place / "queue/read_ahead_kb").read_text())
    return None


@contextmanager
def seen_with(model: Path, read_ahead: str):
    """The path under which llama.cpp reads the model, with that read-ahead window."""
    if read_ahead == "own":
        yield str(model)
        return
    command = ["losetup", "--find", "--show", "--read-only", "--direct-io=on", str(model)]
    device = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        Path(f"/sys/block/{Path(device).name}/queue/read_ahead_kb").write_text(read_ahead)
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


# ---- the report


def bounds(run: dict, free: dict) -> tuple[float, float]:
    """Tokens/s if compute and disk never waited for each other: each at its speed alone, and at the
    speeds they reach side by side."""
    read = run["disk_megabytes_per_token"] * 1e6
    alone = 1 / max(1 / free["decode"], read / run["ceiling"])
    return alone, 1 / max(1 / free["shared_decode"], read / free["shared_ceiling"])


def show_ours(part: str, run: dict, free: dict) -> None:
    if "error" in run:
        print(f"{part:>6}  dali-gguf: {run['error']}", flush=True)
        return
    parts = [f"{part:>6}  dali-gguf {run['decode']:6.2f} t/s"]
    if "ceiling" in run:
        parts += limited_figures(run, free)
    if "shared_decode" in run:
        speed = run["shared_ceiling"] / 1e9
        parts.append(f"{run['shared_decode']:.2f} while the disk is read at {speed:.2f} GB/s")
    parts.append(f"load {run['load_s']:.1f} s, first token {run['first_s']:.1f} s")
    parts.append(f"peak {run['peak'] >> 20}M")
    if "prefill" in run:
        parts.append(f"prefill {run['prefill']:.1f} t/s")
    print(", ".join(parts), flush=True)


def limited_figures(run: dict, free: dict) -> list[str]:
    alone, shared = bounds(run, free)
    missed = (run["disk_misses"] + run["disk_late"]) * run["disk_arena_bytes"] / run["disk_slots"]
    once = run["first_needed"] / run["ceiling"]
    run |= {"bound": alone, "bound_shared": shared}
    run["read_over_missed"] = run["disk_bytes_read"] / missed
    run["first_over_once"] = (run["load_s"] + run["first_s"]) / once
    return [
        f"bound {alone:.2f} ({100 * run['decode'] / alone:.0f}%)",
        f"side by side {shared:.2f} ({100 * run['decode'] / shared:.0f}%)",
        f"hits {100 * run['disk_hit_rate']:.0f}%",
        f"{run['disk_megabytes_per_token']:.0f} MB/token at "
        f"{run['disk_gigabytes_per_second']:.2f} of {run['ceiling'] / 1e9:.2f} GB/s",
        f"wait {run['disk_wait_ms_per_token']:.1f} ms/token",
        f"read/missed {run['read_over_missed']:.3f}",
        f"prefetch [{run['prefetch']}]",
        f"load + first token / reading once {run['first_over_once']:.2f}",
    ]


def show_peer(name: str, other: dict, rate: float | None) -> None:
    if "rate" not in other or rate is None:
        print(f"        llama.cpp {name}: {other.get('error', other)}", flush=True)
        return
    ratio = rate / other["rate"]
    print(f"        llama.cpp {name}: {other['rate']:.2f} t/s, ratio {ratio:.2f}x", flush=True)


def compare(args, part: int, free: dict) -> dict:
    """Both programs at one limit."""
    limit, prefill = args.model.stat().st_size * part // 100, args.prefill if part == 50 else 0
    run, others = ours(args.model, limit, args, prefill), {}
    show_ours(f"{part}%", run, free)
    for read_ahead in args.read_ahead if args.peer else []:
        with seen_with(args.model, read_ahead) as path:
            for tokens, key in ((0, "decode"), (prefill, "prefill"))[: 1 + bool(prefill)]:
                name = f"{key}, read-ahead {read_ahead}"
                others[name] = peer(args, path, limit, tokens)
                show_peer(name, others[name], run.get(key))
    return {"part": part, "ours": run, "peer": others}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", default=os.environ.get("DALI_PEER", ""))
    parser.add_argument("--part", nargs="*", type=int, default=[25, 50, 75], help="limits, %%")
    parser.add_argument("--read-ahead", nargs="*", default=["128", "own"])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--warm", type=int, default=32)
    parser.add_argument("--peer-tokens", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=0, help="prompt tokens, measured at 50%%")
    parser.add_argument("--prefetch", default="residual", choices=("residual", "none"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--greedy", action="store_true", help="both continue the same prompt")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = args.model.stat().st_size
    print(f"{args.model.name}: {size / 1e9:.2f} GB, {args.threads} threads, read_ahead_kb "
          f"{own_read_ahead(args.model)}, llama.cpp with --repack 0, page cache dropped each time")
    free = ours(args.model, NO_LIMIT, args, args.prefill)
    show_ours("none", free, free)
    rows = [{"part": None, "ours": free}, *(compare(args, part, free) for part in args.part)]
    if args.json:
        result = {"model": args.model.name, "bytes": size, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
