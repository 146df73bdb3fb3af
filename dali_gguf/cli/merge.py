"""dali-gguf merge SHARD OUT: the shards of a split GGUF file joined to one file."""

import argparse

HELP = "join the shards of a GGUF file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "input", help="any shard NAME-0000i-of-0000n.gguf; the others lie beside it"
    )
    parser.add_argument("output")


def run(args: argparse.Namespace) -> int:
    from dali_gguf.convert.split import merge

    tensors, size = merge(args.input, args.output)
    print(f"{args.output}: {tensors} tensors, {size / 1e6:.1f} MB")
    return 0
