"""The command line: one file a command, imported only when it is asked for.

A command module has `HELP`, `add_arguments(parser)` and `run(args) -> int` (the exit code).
"""

import argparse
import importlib
import sys
from typing import NoReturn

from dali_gguf.errors import DaliError
from dali_gguf.version import __version__

COMMANDS = {
    "run": "answer a prompt in the terminal",
    "inspect": "what a GGUF file holds",
    "tokenize": "text to token ids",
    "bench": "tokens per second, as llama-bench prints them",
    "warmup": "compile a model's kernels ahead of time",
    "convert": "Hugging Face checkpoint to quantized GGUF",
    "quantize": "GGUF to a smaller GGUF",
    "imatrix": "collect activation statistics for quantize",
    "perplexity": "judge a model or a quantization on a text",
    "split": "cut a GGUF file into shards",
    "merge": "join the shards of a GGUF file",
    "calibrate": "measure this machine for DALI's cost model",
    "plan": "what goes where, before loading",
    "trace": "record a model's routing on a text",
    "simulate": "replay a routing trace on a hardware profile",
}


INTERRUPTED = 130  # as shells report a program that Ctrl-C ended


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other bad input, in place of the usage and a line."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def parse(argv: list[str]) -> argparse.Namespace:
    """The named command's module is imported on the way."""
    parser = Parser(prog="dali-gguf", description="GGUF inference for Mixture-of-Experts models.")
    parser.add_argument("--version", action="version", version=f"dali-gguf {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((a for a in argv if not a.startswith("-")), None)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == wanted:
            module = importlib.import_module(f"dali_gguf.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        return args.run(args)
    except DaliError as error:
        print(f"dali-gguf: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dali-gguf: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def one_line(text: str) -> str:
    """text with line ends and other control characters, say of a damaged file's keys, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


if __name__ == "__main__":
    sys.exit(main())
