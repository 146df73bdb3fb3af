"""split and merge: together they give the same file back, byte for byte."""

import numpy as np
import pytest

from dali_gguf.cli import main
from dali_gguf.convert.gguf_output import V, scalar, string
from dali_gguf.convert.gguf_typed import read_typed
from dali_gguf.convert.split import assign, parse_size
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from tests.small_gguf import write_small


@pytest.fixture
def model(tmp_path):
    path = write_small(tmp_path / "m.gguf")
    ordered = tmp_path / "ordered.gguf"  # the writer of this program pads the last tensor
    assert main(["quantize", str(path), str(ordered), "Q8_0"]) == 0
    return ordered


def test_there_and_back(model, tmp_path):
    assert main(["split", str(model), str(tmp_path / "s"), "--split-max-tensors", "5"]) == 0
    shards = sorted(tmp_path.glob("s-*.gguf"))
    count = len(GGUFFile.open(model).tensors)
    assert [p.name for p in shards] == [
        f"s-{i + 1:05d}-of-{len(shards):05d}.gguf" for i in range(len(shards))
    ]
    assert len(shards) == -(-count // 5)
    assert GGUFFile.open(shards[1]).tensors.keys() == GGUFFile.open(model).tensors.keys()
    assert main(["merge", str(shards[1]), str(tmp_path / "back.gguf")]) == 0
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()


def test_keys_of_the_shards(model, tmp_path):
    assert (
        main(
            [
                "split",
                str(model),
                str(tmp_path / "s"),
                "--split-max-size",
                "50K",
                "--no-tensor-first-split",
            ]
        )
        == 0
    )
    shards = sorted(tmp_path.glob("s-*.gguf"))
    first, second = (read_typed(p) for p in shards[:2])
    count = scalar(V.UINT16, len(shards))
    total = scalar(V.INT32, len(GGUFFile.open(model).tensors))
    assert second == {
        "split.no": scalar(V.UINT16, 1),
        "split.count": count,
        "split.tensors.count": total,
    }
    assert (first["split.no"], first["split.count"]) == (scalar(V.UINT16, 0), count)
    assert first["general.architecture"] == string("llama")
    assert shards[0].stat().st_size < 20_000


def test_quantize_takes_shards(model, tmp_path):
    main(["split", str(model), str(tmp_path / "s"), "--split-max-tensors", "9"])
    shard = sorted(tmp_path.glob("s-*.gguf"))[0]
    assert main(["quantize", str(shard), str(tmp_path / "one.gguf"), "Q8_0"]) == 0
    assert (tmp_path / "one.gguf").read_bytes() == model.read_bytes()


def test_dry_run(model, tmp_path, capsys):
    assert main(["split", str(model), str(tmp_path / "s"), "--dry-run"]) == 0
    assert "s-00001-of-00001.gguf" in capsys.readouterr().out
    assert not list(tmp_path.glob("s-*"))


def test_assign():
    assert assign([1, 1, 1, 1, 1], 2, None, False) == [[0, 1], [2, 3], [4]]
    assert assign([5, 5, 20, 5], None, 10, False) == [[0, 1], [2], [3]]
    assert assign([1, 2], 8, None, True) == [[], [0, 1]]


def test_sizes():
    assert parse_size("300M") == 300_000_000 and parse_size("2g") == 2_000_000_000
    for text in ("0G", "12", "x", "1T"):
        with pytest.raises(InputError):
            parse_size(text)


@pytest.mark.parametrize("flags", [["--split-max-tensors", "0"], ["--split-max-size", "many"]])
def test_bad_flags(flags, model, tmp_path):
    assert main(["split", str(model), str(tmp_path / "s"), *flags]) == 2


def test_merge_refuses_what_is_no_shard(model, tmp_path, capsys):
    assert main(["merge", str(model), str(tmp_path / "x.gguf")]) == 2
    assert "not a shard" in capsys.readouterr().err


def test_merge_does_not_overwrite_a_shard(model, tmp_path, capsys):
    main(["split", str(model), str(tmp_path / "s"), "--split-max-tensors", "9"])
    shard = sorted(tmp_path.glob("s-*.gguf"))[0]
    before = shard.read_bytes()
    assert main(["merge", str(shard), str(shard)]) == 2
    assert shard.read_bytes() == before
    assert np.array_equal(GGUFFile.open(shard).metadata["split.no"], 0)
