"""`dali-gguf trace`: which experts a model uses on a text, recorded for simulate and plan."""

import argparse
import sys
from pathlib import Path

from dali_gguf.cli.arguments import add_model, model_path, output_file, whole
from dali_gguf.engine import Engine
from dali_gguf.errors import InputError
from dali_gguf.offload import counts_file, trace
from dali_gguf.offload.record import REPORT_TEXT, record

HELP = "record a model's routing on a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model(parser)
    add(
        "-f",
        "--file",
        metavar="TEXT",
        help="text to read, documents separated by form feeds; "
        "default: a text of twelve kinds that comes with the package",
    )
    add("-o", "--output", type=output_file, metavar="FILE", help="trace file to write, t.npz")
    add("--length", type=whole(2), default=512, metavar="N", help="tokens of a sequence (512)")
    add("-t", "--threads", type=whole(1), metavar="N", help="default: all cores")
    add(
        "--counts",
        action="store_true",
        help="also keep counts, residual means and linear maps "
        "beside the model, so that the next run starts warm",
    )


def run(args: argparse.Namespace) -> int:
    if not (args.output or args.counts):
        raise InputError("nothing to write: give -o t.npz, --counts, or both")
    text = read_text(Path(args.file) if args.file else REPORT_TEXT)
    with Engine(model_path(args), threads=args.threads, n_ctx=max(args.length, 512)) as engine:
        recorded = record(engine, text, args.length)
        if args.counts:
            where = counts_file.save(engine.path, counts_file.from_trace(recorded))
            print(f"counts of {len(recorded.ids)} tokens: {where}", file=sys.stderr)
    if args.output:
        trace.save(recorded, args.output)
        print(
            f"trace of {len(recorded.ids)} tokens in {recorded.n_sequence} sequences, "
            f"{recorded.n_layer} layers of {recorded.n_expert} experts: {args.output}",
            file=sys.stderr,
        )
    return 0


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"text {path}: {error.strerror}") from None
