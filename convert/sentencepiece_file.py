"""The pieces of a SentencePiece model file: a protocol buffer, of which three fields are needed.

ModelProto has `repeated SentencePiece pieces = 1`; a SentencePiece has piece = 1 (text), score = 2
(float32) and type = 3. (https://github.com/google/sentencepiece, sentencepiece_model.proto)
"""

import struct
from collections.abc import Iterator
from pathlib import Path

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
NORMAL = 1


def read_pieces(path: Path) -> list[tuple[str, float, int]]:
    """(text, score, type) of every piece; types are numbered as GGUF's token types.

    Empty for a file that is no SentencePiece model (Llama 3's tokenizer.model is another format).
    """
    pieces = []
    try:
        for field, value in fields(path.read_bytes()):
            if field == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
    except (ValueError, IndexError, struct.error):
        return []
    return pieces


def _piece(raw: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for field, value in fields(raw):
        if field == 1:
            text = value.decode("utf-8")
        elif field == 2:
            (score,) = struct.unpack("<f", value)
        elif field == 3:
            kind = value
    return text, score, kind


def fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of a protocol buffer message."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        wire = tag & 7
        if wire == VARINT:
            value, at = _varint(raw, at)
        else:
            if wire == BYTES:
                size, at = _varint(raw, at)
            elif wire in (FIXED32, FIXED64):
                size = 4 if wire == FIXED32 else 8
            else:
                raise ValueError(f"wire type {wire}")
            if at + size > len(raw):
                raise ValueError("cut off")
            value, at = raw[at : at + size], at + size
        yield tag >> 3, value


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
