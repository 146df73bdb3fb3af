"""dali-gguf imatrix MODEL -f TEXT: which weight columns matter, for quantize and convert
--imatrix."""

import argparse
import sys

from dali_gguf.cli.arguments import output_file

HELP = "collect activation statistics for quantize"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from dali_gguf.cli.perplexity import add_text_arguments

    parser.add_argument("model", help="a GGUF file, best in F16, BF16 or Q8_0")
    parser.add_argument("-o", "--output", type=output_file, default="imatrix.gguf")
    parser.add_argument(
        "--process-output", action="store_true", help="collect for output.weight too"
    )
    add_text_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from dali_gguf.cli.perplexity import check
    from dali_gguf.convert.imatrix_collect import RecordingDevice
    from dali_gguf.convert.imatrix_file import Importance, save
    from dali_gguf.convert.text_chunks import read_chunks
    from dali_gguf.engine import Engine
    from dali_gguf.offload.scheduler import Scheduler

    check(args)
    device = RecordingDevice(args.threads, args.process_output)
    with Engine(args.model, n_ctx=args.ctx, device=device, n_batch=args.ctx) as engine:
        engine.scheduler.close()
        engine.scheduler = Scheduler(device, engine.model.experts, engine.model.routers)
        chunks = read_chunks(args.file, engine.tokenizer, engine.n_ctx, args.chunks)
        for ids in tqdm(chunks, unit="chunk", disable=None, file=sys.stderr):
            engine.forward(ids, range(len(ids)), rows=slice(None) if args.process_output else None)
    importance = Importance(args.output, device.entries(), [args.file], len(chunks), args.ctx)
    save(args.output, importance)
    print(f"{args.output}: {len(chunks)} runs of {args.ctx} tokens")
    print(importance.coverage_report())
    return 0
