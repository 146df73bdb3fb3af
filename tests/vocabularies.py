"""Vocabularies for tests: two of 1024 tokens from tests/data, and GGUF files of them.

tests/data/vocabularies.json has for "bpe" (cut from SmolLM2's) and "spm" (SentencePiece): the
metadata, the ids that llama.cpp gives for some texts as [text, add_special, parse_special, ids],
and the tokens at which it ends an answer.
"""

import json
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

DATA = Path(__file__).parent / "data" / "vocabularies.json"
ARRAYS = {"tokenizer.ggml.token_type": np.int32, "tokenizer.ggml.scores": np.float32}


@cache
def data() -> dict:
    return json.loads(DATA.read_text(encoding="utf-8"))


def metadata(name: str, **changes) -> dict:
    """Metadata as GGUFFile gives it. changes: keys below tokenizer.ggml; None removes one."""
    found = dict(data()[name]["metadata"])
    found |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    found = {key: value for key, value in found.items() if value is not None}
    return {
        key: np.array(value, ARRAYS[key]) if key in ARRAYS and isinstance(value, list) else value
        for key, value in found.items()
    }


def cases(name: str) -> list:
    return data()[name]["cases"]


def write(path: Path, keys: dict, architecture: str = "llama") -> Path:
    """A vocabulary-only GGUF file with these keys."""
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, np.ndarray):
            writer.add_array(key, value.tolist())
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_tokens() -> list[str]:
    """The 256 letters of byte-level BPE, by byte."""
    from dali_gguf.tokenizer_bpe import BYTE_OF_LETTER

    return [letter for letter, _ in sorted(BYTE_OF_LETTER.items(), key=lambda pair: pair[1])]
