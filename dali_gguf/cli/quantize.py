"""dali-gguf quantize IN OUT TYPE: a GGUF file to a smaller one."""

import argparse

from dali_gguf.errors import InputError

HELP = "GGUF to a smaller GGUF"
EPILOG = """Types: F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K_S/M/L Q4_K_S/M Q5_K_S/M Q6_K
IQ4_NL IQ4_XS MXFP4_MOE, with llama.cpp's choice of type for each tensor.
GGUF has one type a tensor, and the experts of a layer are one tensor: types can differ from
layer to layer (--tensor-type 'blk\\.[0-3]\\.ffn_down_exps=Q8_0'), not from expert to expert.
Only files that still have a tensor an expert (old Mixtral files) allow that too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("input", help="a GGUF file (any shard of a split one)")
    parser.add_argument("output")
    parser.add_argument("type", help="a mixture of types, for example Q4_K_M")
    parser.add_argument(
        "--allow-requantize", action="store_true", help="accept an input that is quantized already"
    )
    add_type_arguments(parser)


def add_type_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that quantize and convert share."""
    parser.add_argument(
        "--tensor-type",
        action="append",
        default=[],
        metavar="REGEX=TYPE",
        help="type of the tensors whose name matches; may be repeated, the first match wins",
    )
    parser.add_argument("--output-type", metavar="TYPE", help="type of output.weight")
    parser.add_argument("--token-embedding-type", metavar="TYPE", help="type of token_embd.weight")
    parser.add_argument(
        "--pure", action="store_true", help="one type for all matrices instead of the mixture"
    )
    parser.add_argument(
        "--imatrix", metavar="FILE", help="importance matrix of dali-gguf imatrix or llama-imatrix"
    )
    parser.add_argument(
        "--no-fallback",
        action="store_true",
        help="refuse when rows do not fit a type's block of 256, instead of using a near type",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print every tensor and the final size, write nothing",
    )
    parser.add_argument("-t", "--threads", type=int, help="default: all cores")


def wishes_of(args: argparse.Namespace):
    """(Wishes, Importance or None) of the shared flags. Raises InputError."""
    import re

    from dali_gguf.convert import imatrix_file
    from dali_gguf.convert.recipes import Wishes, parse_type

    overrides = []
    for text in args.tensor_type:
        pattern, equals, type_ = text.rpartition("=")
        if not equals or not pattern:
            raise InputError(
                f"--tensor-type {text!r}: expected REGEX=TYPE, for example ffn_down_exps=Q6_K"
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"--tensor-type {text!r}: {pattern!r} is no regular expression: {error}"
            ) from None
        overrides.append((pattern, parse_type(type_)))
    if args.threads is not None and args.threads < 1:
        raise InputError(f"--threads {args.threads}: expected 1 or more")
    importance = imatrix_file.load(args.imatrix) if args.imatrix else None
    return Wishes(
        tuple(overrides),
        parse_type(args.output_type) if args.output_type else None,
        parse_type(args.token_embedding_type) if args.token_embedding_type else None,
        args.pure,
        importance is not None,
    ), importance


def run(args: argparse.Namespace) -> int:
    from dali_gguf.convert.quantize import plan
    from dali_gguf.convert.recipes import parse_mixture
    from dali_gguf.gguf_file import GGUFFile

    mixture = parse_mixture(args.type)
    wishes, importance = wishes_of(args)
    quantization = plan(
        GGUFFile.open(args.input), mixture, wishes, importance, args.allow_requantize
    )
    return finish(
        args, args.output, quantization.metadata, quantization.tensors, quantization.inputs, wishes
    )


def finish(
    args: argparse.Namespace, output: str, metadata: dict, tensors: list, inputs: list, wishes
) -> int:
    """Prints the plan (--dry-run) or writes the file and says what came out."""
    from dali_gguf.convert.gguf_output import header
    from dali_gguf.convert.write_model import refuse_fallbacks, summary, table, write_model

    choices = [t.choice for t in tensors]
    for pattern, _ in wishes.overrides:
        warn_unmatched(pattern, choices)
    if args.no_fallback:
        refuse_fallbacks(choices)
    if args.dry_run:
        print(table(choices))
        size = len(header(metadata, [c.info for c in choices])) + sum(
            c.info.padded for c in choices
        )
        print(summary(f"{output} (not written)", size, choices))
        return 0
    size = write_model(output, metadata, tensors, inputs, args.threads)
    print(summary(output, size, choices))
    return 0


def warn_unmatched(pattern: str, choices: list) -> None:
    import re
    import sys

    if not any(re.search(pattern, c.info.name) for c in choices):
        print(
            f"dali-gguf: warning: --tensor-type {pattern!r} matches no tensor; see --dry-run "
            f"for the names",
            file=sys.stderr,
        )
