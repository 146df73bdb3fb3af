"""`dali-gguf bench`: prefill and decode speed of a model, in llama-bench's way."""

import argparse
import csv
import io
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from dali_gguf import models
from dali_gguf.cli.arguments import add_model, model_path, whole
from dali_gguf.cli.messages import say, warnings_in_one_line
from dali_gguf.engine import Engine
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile

HELP = "tokens per second, as llama-bench prints them"


@dataclass(frozen=True, slots=True)
class Result:
    """One row. test: pp512 (prefill), tg128 (decode), tg128 x8 (decode of 8 sequences).

    tokens_per_second: median over the repeats; spread: half of max - min. gigabytes_per_second and
    bandwidth_share (of what the same threads read at most): weights of a decoded token, else 0.
    """

    model: str
    size_gib: float
    threads: int
    batch: int
    test: str
    tokens_per_second: float
    spread: float
    gigabytes_per_second: float
    bandwidth_share: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add("-p", type=numbers, default=[512], metavar="N,..", help="prefill tests: 512; 0 for none")
    add("-n", type=numbers, default=[128], metavar="N,..", help="decode tests: 128; 0 for none")
    add("-b", type=numbers, default=[512], metavar="N,..", help="tokens a prefill step: 512")
    add("-t", type=numbers, default=None, metavar="N,..", help="threads: all cores")
    add("-npl", type=numbers, default=[1], metavar="N,..", help="sequences decoded together: 1")
    add("-r", type=whole(1), default=5, metavar="N", help="repeats: 5")
    add("--kv-type", default="f16", metavar="TYPE", help="f16 (default), q8_0 or f32")
    form = parser.add_mutually_exclusive_group()
    for name in ("md", "json", "csv"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="md")


def numbers(text: str) -> list[int]:
    """An argparse type: whole numbers with commas between."""
    return [whole(0)(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    warnings_in_one_line()
    if min(args.b + (args.t or [1])) < 1:
        raise InputError("-b and -t: give numbers of at least 1")
    if not (any(args.p) or (any(args.n) and any(args.npl))):
        raise InputError("-p, -n and -npl of 0 leave no test: give -p, or -n and -npl, above 0")
    path = model_path(args)
    check_context(path, max(args.p + args.n))
    results = []
    for threads in args.t or [None]:
        for batch in args.b:
            results += measure(path, args, threads, batch)
    print(FORMS[args.form](results))
    return 0


def check_context(path: Path, longest: int) -> None:
    """InputError if a test of so many tokens does not fit the model's context."""
    with GGUFFile.open(path) as file:
        trained = models.read_config(file).n_ctx_train
    if longest > trained > 0:
        raise InputError(f"a test of {longest} tokens: the model's context has room for {trained}")


def measure(path: Path, args: argparse.Namespace, threads: int | None, batch: int) -> list[Result]:
    """All tests with one setting of threads and batch."""
    longest = max(args.p + [n * (n > 0) for n in args.n]) + 8
    with Engine(path, n_ctx=longest, threads=threads, n_batch=batch, n_seq=max(args.npl + [1]),
                kv_type=args.kv_type) as engine:
        from dali_gguf.kernels import ahead
        from dali_gguf.kernels.bandwidth import read_bandwidth

        ahead.do("program")  # else it would be compiled beside the first tests
        bandwidth = read_bandwidth(engine.device.pool)
        say(f"{engine.device.threads} threads read {bandwidth:.1f} GB/s")
        tests = [(f"pp{n}", n, 0, lambda n=n: prefill(engine, n)) for n in args.p if n]
        for n, sequences in ((n, s) for n in args.n if n for s in args.npl if s):
            name = f"tg{n}" if sequences == 1 else f"tg{n} x{sequences}"
            read = engine.model.bytes_per_token * (sequences == 1)
            tests.append((name, n * sequences, read, lambda n=n, s=sequences: decode(engine, n, s)))
        return [result(engine, name, count, read, bandwidth, list(repeat(work, args.r)))
                for name, count, read, work in tests]


def repeat(work, times: int) -> Iterator[float]:
    """Seconds of each repeat, after one that warms up."""
    work()
    for _ in range(times):
        started = time.perf_counter()
        work()
        yield time.perf_counter() - started


def random_ids(engine: Engine, n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, engine.n_vocab, n)


def prefill(engine: Engine, n: int) -> None:
    ids = random_ids(engine, n)
    for start in range(0, n, engine.options.n_batch):
        part = ids[start : start + engine.options.n_batch]
        last = start + len(part) == n
        rows = slice(-1, None) if last else None
        engine.forward(part, np.arange(start, start + len(part)), rows=rows)


def decode(engine: Engine, n: int, sequences: int) -> None:
    ids = random_ids(engine, n * sequences).reshape(n, sequences)
    for position in range(n):
        engine.forward(ids[position], np.full(sequences, position), np.arange(sequences))


def result(engine: Engine, name: str, count: int, read: int, bandwidth: float,
           seconds: list[float]) -> Result:
    speed = count / statistics.median(seconds)
    rate = speed * read / 1e9
    return Result(
        model=engine.path.name, size_gib=round(engine.path.stat().st_size / 2**30, 2),
        threads=engine.device.threads, batch=engine.options.n_batch, test=name,
        tokens_per_second=round(speed, 2),
        spread=round((count / min(seconds) - count / max(seconds)) / 2, 2),
        gigabytes_per_second=round(rate, 2), bandwidth_share=round(rate / bandwidth, 3),
    )


def as_markdown(results: list[Result]) -> str:
    lines = ["| model | size | threads | test | tokens/s | GB/s | of read bandwidth |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for r in results:
        read = f"{r.gigabytes_per_second:.1f} | {100 * r.bandwidth_share:.0f} %"
        read = read if r.gigabytes_per_second else "|"
        lines.append(
            f"| {r.model} | {r.size_gib:.2f} GiB | {r.threads} | {r.test} | "
            f"{r.tokens_per_second:.2f} ± {r.spread:.2f} | {read} |"
        )
    return "\n".join(lines)


def as_json(results: list[Result]) -> str:
    return json.dumps([asdict(r) for r in results], indent=1)


def as_csv(results: list[Result]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Result)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(r) for r in results)
    return text.getvalue().rstrip("\n")


FORMS = {"md": as_markdown, "json": as_json, "csv": as_csv}
