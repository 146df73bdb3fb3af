"""Our side of disk_tier.py: one process, in a memory group, that measures itself."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dali_gguf.sampler import SamplingParams  # noqa: E402

PROMPT = [300 + 7 * i for i in range(8)]


def measure(args) -> None:
    """Prints one JSON line: load, first token, decode and prefill, what came from disk, the
    ceiling."""
    began = time.perf_counter()
    from dali_gguf.engine import Engine
    from dali_gguf.gguf_file import GGUFFile
    from dali_gguf.kernels import cpu  # noqa: F401  compiled code is loaded before the clock starts
    from dali_gguf.offload.disk_forecast import measure_bandwidth

    with GGUFFile.open(args.model) as file:
        ceiling = measure_bandwidth(file.tensors, 1.0)
    imported = time.perf_counter()
    engine = Engine(str(args.model), n_ctx=2048, prefetch=args.prefetch)
    disk, loaded = engine.scheduler.disk_stats, time.perf_counter()
    steps = decode_steps(engine, args.greedy)
    next(steps)
    first = time.perf_counter()
    result = {"import_s": imported - began, "load_s": loaded - imported, "first_s": first - loaded}
    if engine.memory.streams:
        result["first_needed"] = engine.memory.demand.dense + needed_so_far(disk())
    for _ in range(args.warm):
        next(steps)
    before, start = disk(), time.perf_counter()
    text = [next(steps) for _ in range(args.tokens)]
    result["decode"] = args.tokens / (time.perf_counter() - start)
    result |= {"tokens": text[:8], "plan": engine.memory.line()}
    if before is not None:
        used = disk() - before
        result |= {f"disk_{k}": v for k, v in used.as_dict(args.tokens)["disk"].items()}
        result["prefetch"] = engine.scheduler.pays.line()
    if args.prefill:
        result |= measure_prefill(engine, args.prefill)
    if engine.memory.streams:
        result["ceiling"] = max(ceiling, measure_bandwidth(engine.file.tensors, 1.0))
    else:
        result |= measure_shared(args.model, steps)
    engine.close()
    print(json.dumps(result))


def decode_steps(engine, greedy: bool) -> Iterator[int]:
    """One decode step each time. Greedy: the model's own text; else random tokens, as llama-bench
    takes: a random model would soon repeat one token for ever, and route it the same way."""
    if greedy:
        yield from engine.tokens(PROMPT, SamplingParams(temperature=0, max_tokens=-2))
    rng = np.random.default_rng(1)
    engine.forward(PROMPT, np.arange(len(PROMPT)), rows=None)
    for position in range(len(PROMPT), engine.n_ctx):
        token = int(rng.integers(259, engine.n_vocab))
        engine.forward([token], [position])
        yield token


def measure_prefill(engine, tokens: int) -> dict:
    ids = np.random.default_rng(0).integers(259, engine.n_vocab, tokens)
    start, before = time.perf_counter(), engine.scheduler.disk_stats()
    engine.forward(ids, np.arange(tokens), rows=slice(-1, None))
    result = {"prefill": tokens / (time.perf_counter() - start)}
    if before is not None:
        result["prefill_bytes"] = (engine.scheduler.disk_stats() - before).bytes_read
    return result


def measure_shared(model: Path, steps: Iterator[int]) -> dict:
    """Decode while another process reads the file as fast as it can: what both reach together. On a
    virtual machine the disk takes time from the cores, and the cores from the disk."""
    command = [sys.executable, str(Path(__file__)), str(model), "--reader"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        reader.stdout.readline()
        start, count = time.perf_counter(), 0
        while reader.poll() is None:
            next(steps)
            count += 1
        rate = count / (time.perf_counter() - start)
        return {"shared_decode": rate, "shared_ceiling": float(reader.stdout.readline())}


def reader(model: Path) -> None:
    """The other process of measure_shared."""
    from dali_gguf.gguf_file import GGUFFile
    from dali_gguf.offload.disk_forecast import measure_bandwidth

    with GGUFFile.open(model) as file:
        print("ready", flush=True)
        print(measure_bandwidth(file.tensors, 3.0))


def needed_so_far(s) -> int:
    """Bytes of the experts that steps had to wait for."""
    return (s.misses + s.late) * (s.arena_bytes // s.slots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--warm", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--prefetch", default="residual", choices=("residual", "none"))
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--reader", action="store_true", help="only read, for measure_shared")
    args = parser.parse_args()
    if args.reader:
        reader(args.model)
    else:
        measure(args)


if __name__ == "__main__":
    main()
