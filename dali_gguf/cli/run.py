"""`dali-gguf run`: a prompt in, text out as it is made, figures on stderr."""

import argparse
import json
import sys
from pathlib import Path

from dali_gguf.chat import ChatTemplate
from dali_gguf.cli import INTERRUPTED
from dali_gguf.cli.arguments import (
    add_model, model_path, number, output_file, size, unescaped, whole,
)
from dali_gguf.cli.messages import say, shown, utf8_output, warnings_in_one_line
from dali_gguf.engine import Engine
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.sampler import SamplingParams

HELP = "answer a prompt in the terminal"
YELLOW, RESET = "\033[33m", "\033[0m"
ENGINE_OPTIONS = (
    "n_ctx threads n_batch kv_type mmap device vram ram placement prefetch expert_cache verify"
).split()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_prompt(parser.add_argument_group("prompt"))
    add_sampling(parser.add_argument_group("sampling, with llama.cpp's defaults"))
    add_engine(parser.add_argument_group("engine"))
    add_output(parser.add_argument_group("output"))


def add_prompt(group) -> None:
    add = group.add_argument
    add("-p", "--prompt", metavar="TEXT", help="the prompt; - reads it from stdin, as a pipe does")
    add("-f", "--file", metavar="FILE", help="read the prompt from a file")
    add("-sys", "--system-prompt", metavar="TEXT", help="system message of the chat template")
    add(
        "--raw", action="store_true", help="continue the prompt as it is, without the chat template"
    )
    add(
        "--no-escape",
        action="store_true",
        help=r"leave \n, \t, \x41 .. in -p and --stop as they are",
    )


def add_sampling(group) -> None:
    add = group.add_argument
    add(
        "-n",
        "--predict",
        type=whole(-2),
        default=-1,
        metavar="N",
        help="tokens to make; -1 until the model ends (default), -2 until the context is full",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="go on over tokens that end the text, up to -n or until the context is full",
    )
    add("-s", "--seed", type=whole(-1), default=-1, metavar="N", help="-1: another one each time")
    add("--temp", type=number(0), default=0.8, metavar="T", help="0.8; 0 is --greedy")
    add("--greedy", action="store_true", help="always the most likely token")
    add("--top-k", type=whole(0), default=40, metavar="N", help="40; 0 is off")
    add("--top-p", type=number(0, 1), default=0.95, metavar="P", help="0.95; 1 is off")
    add("--min-p", type=number(0, 1), default=0.05, metavar="P", help="0.05; 0 is off")
    add("--repeat-penalty", type=number(0), default=1.0, metavar="X", help="1.0 is off")
    add(
        "--repeat-last-n",
        type=whole(-1),
        default=64,
        metavar="N",
        help="tokens that penalties look back on: 64; 0 is off, -1 all",
    )
    add("--presence-penalty", type=number(-sys.float_info.max), default=0.0, metavar="X")
    add("--frequency-penalty", type=number(-sys.float_info.max), default=0.0, metavar="X")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may repeat",
    )


def add_engine(group) -> None:
    add = group.add_argument
    add("-c", "--ctx-size", dest="n_ctx", type=whole(0), metavar="N", help="4096; 0: as trained")
    add("-t", "--threads", type=whole(1), metavar="N", help="all cores")
    add(
        "-b",
        "--batch-size",
        dest="n_batch",
        type=whole(1),
        metavar="N",
        help="prompt tokens a step: 512",
    )
    add("--kv-type", metavar="TYPE", help="f16 (default), q8_0 or f32")
    add(
        "--no-mmap",
        dest="mmap",
        action="store_const",
        const=False,
        help="read the file into memory",
    )
    add("--device", metavar="D", help="auto, cpu, cuda, cuda:1 or cpu-torch")
    add("--vram", type=size, metavar="SIZE", help="GPU memory to use, as in 6G")
    add("--ram", type=size, metavar="SIZE", help="main memory to use, as in 8G")
    add("--placement", metavar="POLICY", help="which experts run on CPU and GPU")
    add("--prefetch", metavar="POLICY", help="which experts are fetched ahead")
    add("--expert-cache", metavar="POLICY", help="which experts stay near")
    add(
        "--verify",
        action="store_const",
        const=True,
        help="compute all experts again on the CPU, and compare",
    )


def add_output(group) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="one JSON object in place of the text and the figures")
    add(
        "--color",
        nargs="?",
        const="on",
        default="off",
        choices=("on", "off", "auto"),
        help="show the prompt too, in another colour",
    )
    add("--verbose-prompt", action="store_true", help="show the prompt's tokens on stderr")
    add("--stats", action="store_true", help="all figures on stderr")
    add("--stats-json", type=output_file, metavar="FILE", help="all figures to a file")


def run(args: argparse.Namespace) -> int:
    warnings_in_one_line()
    utf8_output()
    prompt, params = read_prompt(args), sampling(args)
    path = model_path(args)
    compile_kernels(path)
    with Engine(path, **engine_options(args)) as engine:
        return answer(engine, prompt, params, args)


def compile_kernels(path: Path) -> None:
    """Before the first run of a kind of model: one line, and all cores compile."""
    from dali_gguf.kernels import ahead  # brings Numba: not for --help

    with GGUFFile.open(path) as file:
        types = {tensor.type for tensor in file.tensors.values()}
    if ahead.missing(types):
        say("compiling kernels for this processor: once, and only those the model needs")
        ahead.compile_all(types)


def answer(engine: Engine, prompt: str, params: SamplingParams, args: argparse.Namespace) -> int:
    template = None if args.raw else ChatTemplate.of(engine.tokenizer)
    if args.system_prompt is not None and template is None:
        raise InputError("-sys needs a chat template; this model has none, or --raw is set")
    text = template.user_turn(prompt, args.system_prompt) if template else prompt
    ids = engine.tokenizer.encode(text, parse_special=template is not None)
    if args.verbose_prompt:
        show_tokens(engine, ids)
    pieces = engine.generate(ids, params)
    if not args.json and wants_color(args.color):
        print(f"{YELLOW}{prompt}{RESET}", end="" if template is None else "\n", flush=True)
    made, code = stream(pieces, quiet=args.json)
    report(engine, prompt, made, args)
    return code


def stream(pieces, quiet: bool) -> tuple[str, int]:
    """Prints the pieces as they come. Returns the whole text and the exit code."""
    made, code = [], 0
    try:
        for piece in pieces:
            made.append(piece)
            if not quiet:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if not quiet:
        print(flush=True)
    return "".join(made), code


def report(engine: Engine, prompt: str, made: str, args: argparse.Namespace) -> None:
    figures = engine.stats.as_dict() | engine.scheduler.figures()
    if args.stats_json:
        write_json(Path(args.stats_json), figures)
    if args.json:
        answer = {"model": str(engine.path), "prompt": prompt, "text": made}
        print(json.dumps(answer | figures, ensure_ascii=False))
        return
    if args.stats:
        show_figures(engine.stats.as_dict())
        if table := engine.scheduler.table():
            print(table, file=sys.stderr)
    say(engine.stats.line())
    if line := engine.scheduler.line():
        say(line)


def show_figures(figures: dict, group: str = "") -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            show_figures(value, f"{group}{name}.")
        else:
            print(f"{group + name:>36}: {value}", file=sys.stderr)


def write_json(path: Path, figures: dict) -> None:
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"--stats-json {path}: {error.strerror}; give a file that can be written"
        ) from None


def read_prompt(args: argparse.Namespace) -> str:
    """From -p, -f or stdin. A last newline there belongs to the file, not to the prompt."""
    if args.prompt is not None and args.file is not None:
        raise InputError("-p and -f: give one prompt")
    if args.prompt is not None and args.prompt != "-":
        return args.prompt if args.no_escape else unescaped(args.prompt)
    if args.file is not None and args.file != "-":
        return read_file(Path(args.file))
    asked_for = args.prompt is not None or args.file is not None
    text = sys.stdin.read() if asked_for or not sys.stdin.isatty() else ""
    if not text:
        raise InputError('no prompt; give one with -p "TEXT", -f FILE, or through a pipe')
    return text.removesuffix("\n")


def read_file(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").removesuffix("\n")
    except OSError as error:
        raise InputError(f"-f {path}: {error.strerror}; give a text file") from None


def sampling(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if args.greedy else args.temp,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repeat_penalty=args.repeat_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        penalty_last_n=args.repeat_last_n,
        seed=args.seed,
        max_tokens=args.predict,
        stop=tuple(text if args.no_escape else unescaped(text) for text in args.stop),
        ignore_eos=args.ignore_eos,
    )


def engine_options(args: argparse.Namespace) -> dict:
    """What was asked for; the engine has the defaults."""
    return {name: value for name in ENGINE_OPTIONS if (value := getattr(args, name)) is not None}


def show_tokens(engine: Engine, ids: list[int]) -> None:
    say(f"the prompt has {len(ids)} tokens:")
    for id in ids:
        print(
            f"{id:>8} -> {shown(engine.tokenizer.token_bytes(id, special=True))}", file=sys.stderr
        )


def wants_color(choice: str) -> bool:
    return choice == "on" or (choice == "auto" and sys.stdout.isatty())
