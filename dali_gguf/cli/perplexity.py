"""dali-gguf perplexity MODEL -f TEXT: how well a model predicts a text, and what quantizing
cost."""

import argparse
import sys

from dali_gguf.errors import InputError

HELP = "judge a model or a quantization on a text"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument(
        "--kl-base",
        metavar="GGUF",
        help="the model before quantization: adds KL divergence and agreement",
    )
    add_text_arguments(parser)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that perplexity and imatrix share."""
    parser.add_argument("-f", "--file", required=True, help="a text, UTF-8")
    parser.add_argument("-c", "--ctx", type=int, default=512, help="tokens a run (default 512)")
    parser.add_argument(
        "--chunks", type=int, default=-1, help="at most so many runs (default: all)"
    )
    parser.add_argument("-t", "--threads", type=int, help="default: the physical cores")


def check(args: argparse.Namespace) -> None:
    if args.ctx < 4:
        raise InputError(f"--ctx {args.ctx}: expected at least 4 tokens")
    if args.chunks == 0 or args.chunks < -1:
        raise InputError(f"--chunks {args.chunks}: expected 1 or more, or -1 for all")


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from dali_gguf.convert.judge import Judgement
    from dali_gguf.convert.text_chunks import read_chunks
    from dali_gguf.engine import Engine

    check(args)
    with Engine(args.model, n_ctx=args.ctx, threads=args.threads, kv_type="f16") as engine:
        chunks = read_chunks(args.file, engine.tokenizer, engine.n_ctx, args.chunks)
        base = None
        if args.kl_base:
            base = Engine(args.kl_base, n_ctx=args.ctx, threads=args.threads, kv_type="f16")
            if base.n_vocab != engine.n_vocab:
                raise InputError(
                    f"{args.kl_base} has {base.n_vocab} tokens, {args.model} has {engine.n_vocab}; "
                    "expected the same model before quantization"
                )
        judgement = Judgement()
        with tqdm(chunks, unit="chunk", disable=None, file=sys.stderr) as bar:
            for ids in bar:
                judgement.add(ids, engine.logits(ids), base.logits(ids) if base else None)
                bar.set_postfix_str(judgement.line())
        if base:
            base.close()
    print(judgement.report())
    return 0
