"""`dali-gguf warmup`: compiles a model's kernels now, so that its first answer need not wait."""

import argparse
import sys

import numpy as np
from gguf import GGMLQuantizationType as Q
from tqdm import tqdm

from dali_gguf.cli.arguments import add_model, model_path
from dali_gguf.cli.messages import say, warnings_in_one_line
from dali_gguf.engine import Engine
from dali_gguf.gguf_file import GGUFFile

HELP = "compile a model's kernels ahead of time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)


def run(args: argparse.Namespace) -> int:
    warnings_in_one_line()
    path = model_path(args)
    from dali_gguf.kernels import CACHE_DIR, ahead
    from dali_gguf.kernels.formats import format_of

    with GGUFFile.open(path) as file:
        types = {format_of(t.type, t.name).type for t in file.tensors.values()}
    with tqdm(total=len(ahead.missing(types)) + 1, unit="kernel", file=sys.stderr) as progress:
        ahead.compile_all(types, lambda task: progress.update())
        ahead.do("program")
        progress.update()
    try_tiles(types)
    with Engine(path, n_ctx=64) as engine:
        for tokens in (8, 1):  # prefill and decode: what this model needs besides
            engine.forward(np.arange(tokens) % engine.n_vocab, np.arange(tokens))
    say(f"kernels for {path.name} are in {CACHE_DIR}")
    return 0


def try_tiles(types: set[Q]) -> None:
    """Finds out, and says, for which of these types AMX pays; nothing where there is none."""
    from dali_gguf.kernels import amx_check, isa

    found = amx_check.find_out(types) if isa.AMX else {}
    if found:
        say(amx_check.summary(found))
