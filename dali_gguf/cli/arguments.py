"""Types and groups of command-line arguments that several commands share."""

import argparse
import math
import re
from pathlib import Path

from dali_gguf import hub
from dali_gguf.cli.messages import say
from dali_gguf.errors import InputError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}


def whole(at_least: int):
    """An argparse type: a whole number of at least `at_least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number of at least {at_least}"
            )
        return value

    return parse


def number(low: float, high: float = math.inf):
    """An argparse type: a finite number in [low, high]."""
    limits = f"from {low:g} to {high:g}" if math.isfinite(high) else f"of at least {low:g}"
    limits = limits if math.isfinite(low) else ""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a finite number {limits}".rstrip())
        return value

    return parse


def size(text: str) -> int:
    """An argparse type: bytes, as in 6G, 512M, 1.5GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    value = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size above 0; write it like 6G or 512M"
        )
    return value


def output_file(text: str) -> str:
    """An argparse type: a file to write, refused before any work if there is no place for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return text


def unescaped(text: str) -> str:
    r"""text with \n \t \r \' \" \\ and \x41 as the characters they mean."""

    def character(match: re.Match) -> str:
        return chr(int(match[1][1:], 16)) if match[1][0] == "x" else ESCAPES[match[1]]

    return re.sub(r"\\(x[0-9a-fA-F]{2}|[ntr\\'\"])", character, text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """MODEL or -m MODEL; without one, the embedded model."""
    text = (
        "GGUF file, a shard of a split one, or hf:owner/repo[:quant]; default: the embedded model"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("-m", "--model", dest="model_option", metavar="MODEL", help="the same")


def model_path(args: argparse.Namespace) -> Path:
    """The file to open, downloaded if it is on the hub. Says so if it is the embedded model."""
    from dali_gguf.engine import default_model

    if args.model and args.model_option and args.model != args.model_option:
        raise InputError(f"two models: {args.model} and -m {args.model_option}; give one")
    model = args.model or args.model_option
    if model is None:
        path = default_model()
        say(f"no model given, using the embedded {path.name}")
        return path
    return hub.fetch(model) if hub.is_hub_name(model) else Path(model)
