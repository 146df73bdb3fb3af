"""dali-gguf and llama.cpp in turn on the same files: tokens per second, and their ratio.

    python tests/benchmarks/against_llama.py MODEL.gguf.. --peer DIR [-t 1,2] [-p 512] [-n 32]
        [-npl 4,16,64] [--rounds 3]

DIR holds llama-bench and llama-batched-bench, built for this processor. Nothing else may run:
llama.cpp's threads spin, and crawl when a core is taken from them. Each round runs every test once
with either program; medians over the rounds are compared. `expert` and `dense` are not told apart
here.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path


def peer(args, tool: str, *options) -> list[dict]:
    """Runs a tool of llama.cpp; its JSON objects, one a line or one array."""
    folder = Path(args.peer)
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    command = [str(folder / tool), *map(str, options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tool} failed: {done.stderr.strip().splitlines()[-1:]}")
    if done.stdout.lstrip().startswith("["):
        return json.loads(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def ours(*options) -> list[dict]:
    command = [sys.executable, "-m", "dali_gguf", "bench", *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"bench failed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def round_of(args, model: str, threads: int) -> dict[str, tuple[float, float, dict]]:
    """test -> (our tokens/s, theirs, our row)."""
    found = {}
    mine = ours(model, "-t", threads, "-p", args.p, "-n", args.n, "-r", args.r)
    theirs = peer(args, "llama-bench", "-m", model, "-t", threads, "-p", args.p, "-n", args.n,
                  "-r", args.r, "-o", "json")
    speeds = {
        f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": r["avg_ts"] for r in theirs
    }
    for row in mine:
        found[row["test"]] = (row["tokens_per_second"], speeds[row["test"]], row)
    for n in args.npl:
        row = ours(model, "-t", threads, "-p", 0, "-n", args.n, "-npl", n, "-r", 1)[0]
        (batch,) = peer(args, "llama-batched-bench", "-m", model, "-t", threads, "-tb", threads,
                        "-npp", 1, "-ntg", args.n, "-npl", n, "-c", n * (args.n + 8),
                        "--output-format", "jsonl")
        found[row["test"]] = (row["tokens_per_second"], batch["speed_tg"], row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--peer", required=True, metavar="DIR")
    numbers = lambda text: [int(part) for part in text.split(",") if part]
    parser.add_argument("-t", type=numbers, default=[1, 2])
    parser.add_argument("-p", type=int, default=512)
    parser.add_argument("-n", type=int, default=32)
    parser.add_argument("-npl", type=numbers, default=[])
    parser.add_argument("-r", type=int, default=2, help="repeats within a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("| model | threads | test | dali-gguf | llama.cpp | ratio | of read bandwidth |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    for model in args.models:
        for threads in args.t:
            rounds = [round_of(args, model, threads) for _ in range(args.rounds)]
            for test in rounds[0]:
                mine, theirs = (statistics.median(r[test][i] for r in rounds) for i in (0, 1))
                ratio = statistics.median(r[test][0] / r[test][1] for r in rounds)
                share = statistics.median(r[test][2]["bandwidth_share"] for r in rounds)
                share = f"{100 * share:.0f} %" if share else ""
                print(f"| {Path(model).name} | {threads} | {test} | {mine:.2f} | {theirs:.2f} | "
                      f"{ratio:.2f} | {share} |", flush=True)


if __name__ == "__main__":
    main()
