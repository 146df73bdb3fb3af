"""The header parser against gguf-py's, and every way a file can be wrong."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from dali_gguf.errors import ModelFileError, UnsupportedError
from dali_gguf.gguf_file import GGUFFile
from tests.small_gguf import small_keys, small_tensors, write_small

STRING, ARRAY, U32 = 8, 9, 4


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    keys: list[bytes], tensors: list[bytes], data: int = 0, n_key=None, n_tensor=None, version=3
) -> bytes:
    n_tensor = len(tensors) if n_tensor is None else n_tensor
    n_key = len(keys) if n_key is None else n_key
    head = (
        b"GGUF" + struct.pack("<IQQ", version, n_tensor, n_key) + b"".join(keys) + b"".join(tensors)
    )
    return head + bytes(-len(head) % 32 + data)


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


ONE = [entry("a", (32,), 0, 0)]
BAD = {
    "empty": (b"", "empty"),
    "not gguf": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "only magic": (b"GGUF", "cut off"),
    "version 1": (file_of([], [], 64, version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "huge key count": (file_of([], [], 64, n_key=2**63 - 1), "do not fit"),
    "huge tensor count": (file_of([], [], 64, n_tensor=2**64 - 1), "do not fit"),
    "more keys than there are": (file_of([u32("a", 1)], [], 64, n_key=3), "name of 0 bytes"),
    "huge key length": (file_of([struct.pack("<Q", 2**63 - 1) + bytes(32)], []), "cut off"),
    "long key": (
        file_of([text("k" * 70000) + struct.pack("<II", U32, 1)], []),
        "name of 70000 bytes",
    ),
    "key not utf-8": (
        file_of([struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", U32, 1)], [], 9),
        "not UTF-8",
    ),
    "duplicate key": (file_of([u32("a.b", 1), u32("a.b", 2)], []), "key a.b is there twice"),
    "unknown value type": (file_of([key("a", 77, bytes(8))], []), "unknown value type 77"),
    "huge text": (file_of([key("a", STRING, struct.pack("<Q", 2**63 - 1))], [], 64), "key a"),
    "huge text array": (
        file_of([key("a", ARRAY, struct.pack("<IQ", STRING, 2**61))], [], 64),
        "key a",
    ),
    "huge number array": (
        file_of([key("a", ARRAY, struct.pack("<IQ", U32, 2**62 + 1))], [], 64),
        "key a",
    ),
    "array of arrays": (
        file_of([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(20))], []),
        "array of the unknown",
    ),
    "text array cut off": (
        file_of(
            [
                key(
                    "a",
                    ARRAY,
                    struct.pack("<IQ", STRING, 3) + text("x") + struct.pack("<Q", 999) + bytes(40),
                )
            ],
            [],
        ),
        "999 bytes expected",
    ),
    "bool of 2": (file_of([key("a", 7, b"\2")], []), "expected 0 or 1"),
    "alignment 0": (file_of([u32("general.alignment", 0)], []), "power of two"),
    "alignment 3": (file_of([u32("general.alignment", 3)], []), "power of two"),
    "alignment a text": (
        file_of([key("general.alignment", STRING, text("32"))], []),
        "power of two",
    ),
    "no dimensions": (file_of([], [entry("a", (), 0, 0)], 64), "0 dimensions"),
    "many dimensions": (file_of([], [entry("a", (1,) * 9, 0, 0)], 64), "9 dimensions"),
    "zero dimension": (file_of([], [entry("a", (32, 0), 0, 0)], 64), "shape [0, 32]"),
    "huge dimensions": (file_of([], [entry("a", (2**63, 2**63), 0, 0)], 64), "cut off"),
    "rows not whole blocks": (file_of([], [entry("a", (33,), 8, 0)], 64), "multiple of 32"),
    "unknown tensor type": (
        file_of([], [entry("a", (32,), 9999, 0)], 64),
        "tensor a has the unknown type 9999",
    ),
    "past the end": (file_of([], ONE, 127), "cut off or damaged: tensor a ends at byte"),
    "huge offset": (file_of([], [entry("a", (32,), 0, 2**63)], 128), "cut off"),
    "offset not aligned": (file_of([], [entry("a", (1,), 0, 4)], 128), "not a multiple of 32"),
    "duplicate tensor": (
        file_of([], [*ONE, entry("a", (32,), 0, 128)], 256),
        "tensor a is there twice",
    ),
    "overlap": (
        file_of([], [*ONE, entry("b", (32,), 0, 96)], 256),
        "tensor a runs into the bytes of tensor b",
    ),
    "split count a text": (file_of([key("split.count", STRING, text("3"))], []), "split.count"),
    "split, odd name": (file_of([u32("split.count", 3)], []), "is one of 3 shards"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_one_clear_line(name, tmp_path):
    content, expected = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    for mmap in (True, False):
        with pytest.raises(ModelFileError) as caught:
            GGUFFile.open(path, mmap=mmap)
        message = str(caught.value)
        assert expected in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize(
    "path, expected", [("none.gguf", "no such file"), (".", "not a regular file")]
)
def test_a_path_that_is_no_file(path, expected, tmp_path):
    with pytest.raises(ModelFileError, match=expected):
        GGUFFile.open(tmp_path / path)


def test_cut_off_anywhere(tmp_path):
    whole = write_small(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 400), *range(400, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            GGUFFile.open(path)


def test_same_as_gguf_py(tmp_path):
    path = write_small(tmp_path / "a.gguf", alignment=64)
    reader = gguf.GGUFReader(path)
    for mmap in (True, False):
        with GGUFFile.open(path, mmap=mmap) as file:
            for name, field in reader.fields.items():
                if not name.startswith("GGUF."):
                    found, expected = file.metadata[name], field.contents()
                    assert (
                        list(found) == expected if isinstance(expected, list) else found == expected
                    )
            assert list(file.tensors) == [t.name for t in reader.tensors]
            for theirs in reader.tensors:
                ours = file.tensors[theirs.name]
                assert (
                    ours.shape == tuple(int(n) for n in theirs.shape[::-1])
                    and ours.type == theirs.tensor_type
                )
                assert np.array_equal(ours.data, theirs.data.view(np.uint8).ravel())
                assert (
                    Path(ours.file).read_bytes()[ours.offset : ours.offset + ours.nbytes]
                    == ours.data.tobytes()
                )


def test_every_kind_of_value(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "x")
    values = {
        "UINT8": 200, "INT8": -3, "UINT16": 60000, "INT16": -9, "UINT32": 2**31, "INT32": -5,
        "UINT64": 2**63, "INT64": -(2**60),
    }  # fmt: skip
    for name, value in values.items():
        writer.add_key_value(name, value, gguf.GGUFValueType[name])
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "\u00e9\n")
    writer.add_array("texts", ["", "a" * (3 << 20), "\U0001f600"])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = GGUFFile.open(tmp_path / "v.gguf").metadata
    assert {k: found[k] for k in values} == values
    assert (
        found["f32"] == 0.5
        and found["f64"] == 0.1
        and found["yes"] is True
        and found["text"] == "\u00e9\n"
    )
    assert found["texts"] == ["", "a" * (3 << 20), "\U0001f600"] and type(found["UINT8"]) is int
    assert found["floats"].tolist() == [0.5, 1.5] and found["flags"].dtype == bool


def write_shards(folder: Path) -> list[Path]:
    names, tensors = list(small_tensors()), small_tensors()
    paths = []
    for i in range(3):

        def keys(writer, i=i):
            if i == 0:
                small_keys(writer)
            writer.add_uint16("split.no", i)
            writer.add_uint16("split.count", 3)
            writer.add_int32("split.tensors.count", len(names))

        part = {n: tensors[n] for n in names[i::3]}
        paths.append(write_small(folder / f"m-{i + 1:05d}-of-00003.gguf", part, keys))
    return paths


def test_shards_from_any_of_them(tmp_path):
    paths = write_shards(tmp_path)
    for path in paths:
        file = GGUFFile.open(path)
        assert sorted(file.tensors) == sorted(small_tensors()) and file.paths == paths
        assert file.metadata["llama.block_count"] == 2


def test_shards_that_do_not_fit(tmp_path):
    paths = write_shards(tmp_path)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFileError, match="says it is shard 2 of 3; by its name it should be 1"):
        GGUFFile.open(paths[0])
    paths[1].unlink()
    with pytest.raises(ModelFileError, match="shard m-00002-of-00003.gguf of 3 is missing"):
        GGUFFile.open(paths[0])
    paths[1].write_bytes(second.replace(b"blk.0.attn_v.", b"blk.1.attn_v."))
    with pytest.raises(ModelFileError, match="is also in"):
        GGUFFile.open(paths[0])


def test_a_vocabulary_alone(tmp_path):
    file = GGUFFile.open(write_small(tmp_path / "v.gguf", {}))
    assert file.tensors == {} and len(file.metadata["tokenizer.ggml.tokens"]) > 256


def test_a_half_downloaded_file_is_noticed(tmp_path, capsys):
    path = write_small(tmp_path / "a.gguf")
    with open(path, "ab") as file:
        file.truncate(4 << 20)
    GGUFFile.open(path)
    assert "bytes are on disk" in capsys.readouterr().err


def test_a_large_vocabulary_opens_fast(tmp_path):
    """150,000 tokens and merges. The bound is loose; alone on the machine it takes 0.15 s."""
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "llama")
    writer.add_token_list([f"token number {i}" for i in range(150_000)])
    writer.add_token_merges([f"to ken{i}" for i in range(150_000)])
    writer.add_token_types([1] * 150_000)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    started = time.process_time()
    assert len(GGUFFile.open(tmp_path / "v.gguf").metadata["tokenizer.ggml.merges"]) == 150_000
    assert time.process_time() - started < 1.0


def test_unsupported_is_a_model_file_error():
    assert issubclass(UnsupportedError, ModelFileError)
