"""What a decoded token costs besides its arithmetic: Python, and the launches' barriers.

    python tests/benchmarks/launch_overhead.py MODEL.gguf [-t 1,2] [-n 48]

Python: the step's time less the time within the one call that runs its program. Launches: their
number times what a launch of nothing costs, the barriers inside a MoE layer counted as launches.
Both per token, and their share of the step. The same steps without a program stand beside it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from dali_gguf import replay  # noqa: E402
from dali_gguf.engine import Engine  # noqa: E402
from dali_gguf.kernels import ahead, lines  # noqa: E402
from dali_gguf.kernels.pool import Pool, work_function  # noqa: E402

MOE_BARRIERS = 4  # within moe_work, besides the launch's own


def nothing(job, thread, threads):
    pass


def empty_launch(pool: Pool) -> float:
    """Seconds of a launch that does nothing."""
    work, times = work_function(nothing), []
    for _ in range(2000):
        started = time.perf_counter()
        pool.run(work, 0)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def steps(engine: Engine, n: int, first: int) -> list[float]:
    rng, times = np.random.default_rng(first), []
    for position in range(first, first + n):
        token = int(rng.integers(engine.n_vocab))
        started = time.perf_counter()
        engine.forward([token], [position])
        times.append(time.perf_counter() - started)
    return times


def measure(model: str, threads: int, n: int) -> None:
    inside: list[float] = []
    run_lines = lines.run_lines

    def timed(*args):
        started = time.perf_counter()
        done = run_lines(*args)
        inside.append(time.perf_counter() - started)
        return done

    with Engine(model, threads=threads, n_ctx=3 * n + 16) as engine:
        steps(engine, 4, 0)
        (program,) = engine.model._replays._programs.values()
        kinds = [line[0] for line in program._lines]
        launches = kinds.count(lines.LAUNCH) + kinds.count(lines.MOE) * (1 + MOE_BARRIERS)
        lines.run_lines = timed
        whole = steps(engine, n, 4)
        lines.run_lines = run_lines
        python = statistics.median(w - i for w, i in zip(whole, inside))
        replay.MOST_TOKENS = 0
        plain = statistics.median(steps(engine, n, 4 + n))
        replay.MOST_TOKENS = 8
        launching = launches * empty_launch(engine.device.pool)
    step = statistics.median(whole)
    share = (python + launching) / step
    print(f"{threads} threads: step {1e3 * step:.2f} ms, Python {1e6 * python:.0f} us, "
          f"{launches} launches {1e6 * launching:.0f} us, together {share:.1%}; "
          f"without a program {1e3 * plain:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("-t", type=numbers, default=[1, 2])
    parser.add_argument("-n", type=int, default=48)
    args = parser.parse_args()
    ahead.do("program")
    for threads in args.t:
        measure(args.model, threads, args.n)


if __name__ == "__main__":
    main()
