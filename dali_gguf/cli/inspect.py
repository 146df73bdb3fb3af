"""`dali-gguf inspect`: architecture, sizes, types, tokenizer, and what of a file is experts."""

import argparse
import json

from dali_gguf import inventory
from dali_gguf.cli.arguments import add_model, model_path
from dali_gguf.cli.messages import utf8_output
from dali_gguf.gguf_file import GGUFFile

HELP = "what a GGUF file holds"
UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    utf8_output()
    with GGUFFile.open(model_path(args)) as file:
        found = describe(file)
    print(json.dumps(found, ensure_ascii=False, indent=1) if args.json else report(found))
    return 0


def describe(file: GGUFFile) -> dict:
    """Everything that inspect shows, for --json."""
    metadata, parts = file.metadata, inventory.rows(file.tensors.values())
    return {
        "files": [str(path) for path in file.paths],
        "architecture": str(metadata.get("general.architecture", "")),
        "name": str(metadata.get("general.name", "")),
        "sizes": inventory.sizes(metadata, inventory.SIZES),
        "experts": inventory.experts(metadata, parts),
        "tokenizer": inventory.tokenizer(metadata),
        "tensors": [row.as_dict() for row in parts],
        "total": inventory.total(parts).as_dict(),
    }


def report(found: dict) -> str:
    lines = [f"{found['files'][0]}" + more_files(found), f"architecture  {found['architecture']}"]
    lines += [f"name          {found['name']}"] if found["name"] else []
    lines += [f"sizes         {listed(found['sizes'])}"]
    lines += [f"experts       {experts_line(found['experts'], found['total']['bytes'])}"]
    lines += [f"tokenizer     {tokenizer_line(found['tokenizer'])}", ""]
    lines += [
        f"{'group':<15} {'type':<7} {'tensors':>7} {'weights':>15} {'bytes':>15} {'bits each':>10}"
    ]
    lines += [table_line(row) for row in [*found["tensors"], found["total"]]]
    return "\n".join(lines)


def more_files(found: dict) -> str:
    count = len(found["files"])
    return f" and {count - 1} more shards" if count > 1 else ""


def listed(values: dict) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def experts_line(experts: dict, all_bytes: int) -> str:
    if not all_bytes:
        return "no weights, a vocabulary only"
    if not experts.get("count"):
        return f"none (dense); a token reads {human(experts['bytes_per_token'])}"
    shared = f" and {experts['shared']} shared" if experts.get("shared") else ""
    return (
        f"{experts['count']} a layer, {experts.get('used', '?')} used{shared}; "
        f"{human(experts['bytes'])} of {human(all_bytes)} ({experts['share_of_file']:.1%}); "
        f"a token reads {human(experts['bytes_per_token'])}"
    )


def tokenizer_line(tokenizer: dict) -> str:
    if not tokenizer["model"]:
        return "none"
    ends = [f"{name} {tokenizer[name]!r}" for name in ("bos", "eos") if name in tokenizer]
    template = "chat template" if tokenizer["chat_template"] else "no chat template"
    kind = f"{tokenizer['model']} ({tokenizer['pre']})" if tokenizer["pre"] else tokenizer["model"]
    return ", ".join([kind, f"{tokenizer['tokens']} tokens", *ends, template])


def table_line(row: dict) -> str:
    return (
        f"{row['group']:<15} {row['type']:<7} {row['tensors']:>7} {row['weights']:>15,} "
        f"{row['bytes']:>15,} {row['bits_per_weight']:>10.2f}"
    )


def human(size: float) -> str:
    unit, scale = next(((u, s) for u, s in UNITS if size >= s), ("bytes", 1))
    return f"{size / scale:.3g} {unit}" if scale > 1 else f"{size} bytes"
