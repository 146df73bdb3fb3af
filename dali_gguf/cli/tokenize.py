"""`dali-gguf tokenize`: the tokens of a text, also with a vocabulary-only file."""

import argparse
import json
import sys

from dali_gguf.cli.arguments import add_model, model_path
from dali_gguf.cli.messages import shown, utf8_output, warnings_in_one_line
from dali_gguf.tokenizer import Tokenizer

HELP = "text to token ids"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add = parser.add_argument
    add("-p", "--prompt", metavar="TEXT", help="the text; from stdin if not given")
    add("--ids", action="store_true", help="one line: [1, 2, 3]")
    add("--no-special", action="store_true", help="no BOS and EOS, and control tokens stay text")


def run(args: argparse.Namespace) -> int:
    warnings_in_one_line()
    utf8_output()
    tokenizer = Tokenizer.from_gguf(model_path(args))
    text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    special = not args.no_special
    ids = tokenizer.encode(text, add_special=special, parse_special=special)
    if args.ids:
        print(json.dumps(ids))
        return 0
    for id in ids:
        print(f"{id:>6} -> {shown(tokenizer.token_bytes(id, special=True))}")
    return 0
