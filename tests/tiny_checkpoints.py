"""Tiny Hugging Face checkpoint folders: a model of tests/tiny_models with a tokenizer beside it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny_kinds import KINDS, checkpoint
from tests.vocabulary_file import BYTES, N_VOCAB


def tokenizer_json() -> dict:
    """A byte-level BPE of at most N_VOCAB tokens with GPT-2's pre-tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = ["<unk>", "<s>", "</s>", *sorted(ByteLevel.alphabet())]
    merges = [["t", "h"], ["Ġ", "t"], ["h", "e"], ["Ġt", "he"], ["i", "n"], ["e", "r"]]
    words += ["".join(pair) for pair in merges]
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "post_processor": None,
        "added_tokens": [{"id": i, "content": words[i], **special} for i in range(3)],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {word: i for i, word in enumerate(words)}, "merges": merges,
        },
    }  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()), encoding="utf-8")
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages[0]['content'] }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_sentencepiece(folder: Path) -> None:
    """A tokenizer.model as a protocol buffer, written by hand: N_VOCAB pieces with byte
    fallback."""

    def field(number: int, wire: int, payload: bytes) -> bytes:
        return bytes([number << 3 | wire]) + payload

    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((b, 0.0, 6) for b in BYTES)]
    pieces += [(f"\u2581w{i}", -float(i), 1) for i in range(N_VOCAB - len(pieces))]
    raw = b""
    for text, score, kind in pieces:
        utf8 = text.encode()
        inner = field(1, 2, bytes([len(utf8)]) + utf8) + field(2, 5, np.float32(score).tobytes())
        inner += field(3, 0, bytes([kind]))
        raw += field(1, 2, bytes([len(inner)]) + inner)
    raw += field(2, 2, b"\x03\x98\x02\x01")  # trainer_spec.byte_fallback = true
    (folder / "tokenizer.model").write_bytes(raw)


def write_checkpoint(folder: Path, kind: str, dtype: str = "float32"):
    """The checkpoint of KINDS[kind] as transformers saves it; returns the model."""
    import torch

    model = checkpoint(KINDS[kind]).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model.float()


def edit_config(folder: Path, **changes) -> None:
    """Sets values of config.json; a value of None takes the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_weights(folder: Path, change) -> None:
    """Rewrites model.safetensors with what change(dict of numpy arrays) returns."""
    path = folder / "model.safetensors"
    save_file({k: np.ascontiguousarray(v) for k, v in change(load_file(path)).items()}, path)


def fuse_experts(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor an expert to transformers 5's stacks [E, 2F, D] and [E, D, F]."""
    stacks: dict[str, dict[int, np.ndarray]] = {}
    out = {}
    for name, array in weights.items():
        before, found, after = name.partition(".experts.")
        if not found:
            out[name] = array
            continue
        e, role, _ = after.split(".")
        stacks.setdefault(f"{before}.experts.{role}", {})[int(e)] = array
    joined = {name: np.stack([s[e] for e in range(len(s))]) for name, s in stacks.items()}
    for name, stack in joined.items():
        if name.endswith(("up_proj", "w3")):
            continue
        base, role = name.rsplit(".", 1)
        if role in ("down_proj", "w2"):
            out[f"{base}.down_proj"] = stack
        else:
            up = joined[f"{base}.{'w3' if role == 'w1' else 'up_proj'}"]
            out[f"{base}.gate_up_proj"] = np.concatenate([stack, up], 1)
    return out
