"""dali-gguf convert HF_DIR_OR_REPO: a Hugging Face checkpoint to a GGUF file, quantized on the
way."""

import argparse
from pathlib import Path

from dali_gguf.cli.quantize import add_type_arguments, finish, wishes_of
from dali_gguf.errors import InputError

HELP = "Hugging Face checkpoint to quantized GGUF"
FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "README.md", "merges.txt"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", help="a folder with config.json and safetensors, or owner/repo of the hub"
    )
    parser.add_argument("-o", "--output", help="default: NAME-TYPE.gguf in the current folder")
    parser.add_argument(
        "--type",
        default="auto",
        help="a mixture of types as in quantize; auto (default) keeps the checkpoint's own type",
    )
    parser.add_argument("--pre", help="name of the pre-tokenizer, where it is not recognized")
    parser.add_argument(
        "--name", help="general.name of the model; default: from the model card or the folder"
    )
    add_type_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from dali_gguf.convert.convert import plan
    from dali_gguf.convert.recipes import parse_mixture

    mixture = "auto" if args.type.lower() == "auto" else parse_mixture(args.type)
    wishes, importance = wishes_of(args)
    folder = checkpoint_folder(args.checkpoint)
    conversion = plan(folder, mixture, wishes, importance, args.pre, args.name)
    output = args.output or f"{Path(args.checkpoint).resolve().name}-{conversion.mixture}.gguf"
    return finish(args, output, conversion.metadata, conversion.tensors, conversion.inputs, wishes)


def checkpoint_folder(text: str) -> Path:
    """The folder itself, or a hub repository in the hub's cache (fetched where it is missing)."""
    path = Path(text)
    if path.is_dir():
        return path
    repo = text.removeprefix("hf:")
    if path.exists() or repo.count("/") != 1 or repo.startswith((".", "/", "~")):
        found = "is a file" if path.exists() else "does not exist"
        raise InputError(
            f"{text} {found}; expected the folder of a checkpoint or owner/repo of the hub"
        )
    return download(repo)


def download(repo: str) -> Path:
    """Raises InputError with the hub's reason."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, allow_patterns=FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{repo}: cannot be fetched from the hub: {reason}") from None
