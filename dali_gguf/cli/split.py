"""dali-gguf split FILE PREFIX: shards PREFIX-00001-of-0000N.gguf, as llama-gguf-split makes
them."""

import argparse

from dali_gguf.errors import InputError

HELP = "cut a GGUF file into shards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="a GGUF file")
    parser.add_argument("prefix", help="path and name of the shards, without -00001-of-0000N.gguf")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--split-max-tensors", type=int, metavar="N", help="tensors a shard (default 128)"
    )
    limit.add_argument(
        "--split-max-size", metavar="SIZE", help="bytes of weights a shard, like 300M or 2G"
    )
    parser.add_argument(
        "--no-tensor-first-split", action="store_true", help="keep weights out of the first shard"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the shards, write nothing")


def run(args: argparse.Namespace) -> int:
    from dali_gguf.convert.split import parse_size, split

    max_bytes = parse_size(args.split_max_size) if args.split_max_size else None
    max_tensors = args.split_max_tensors if args.split_max_tensors is not None or max_bytes else 128
    if max_tensors is not None and max_tensors < 1:
        raise InputError(f"--split-max-tensors {max_tensors}: expected 1 or more")
    shards = split(
        args.input, args.prefix, max_tensors, max_bytes, args.no_tensor_first_split, args.dry_run
    )
    for path, tensors, size in shards:
        print(
            f"{path}: {tensors} tensors, {size / 1e6:.1f} "
            f"MB{' (not written)' if args.dry_run else ''}"
        )
    return 0
