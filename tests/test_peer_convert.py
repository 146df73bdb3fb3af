"""Files made here, in llama.cpp's own tools (DALI_PEER: the folder of its programs)."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dali_gguf.cli import main
from dali_gguf.convert.imatrix_file import load
from dali_gguf.gguf_file import GGUFFile
from tests.small_gguf import write_small
from tests.tiny_checkpoints import write_checkpoint, write_sentencepiece

pytestmark = pytest.mark.peer
# not olmoe with grouped heads and not a 3-layer V2-Lite: llama.cpp loads neither,
# not even its own files
KINDS = (
    "llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2moe",
    "qwen3moe",
    "deepseek2-groups",
    "deepseek3",
    "gpt-oss",
)


def peer(program: str, *args) -> subprocess.CompletedProcess:
    folder = Path(os.environ.get("DALI_PEER", ""))
    if not (folder / program).is_file():
        pytest.skip("DALI_PEER does not name a folder with llama.cpp's programs")
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    result = subprocess.run(
        [folder / program, *map(str, args)],
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result


def completion(path) -> subprocess.CompletedProcess:
    return peer(
        "llama-completion",
        "-m",
        path,
        "-no-cnv",
        "-p",
        "the",
        "-n",
        32,
        "--temp",
        0,
        "--no-warmup",
        "-t",
        2,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_loads_without_a_warning(kind, tmp_path):
    write_checkpoint(tmp_path, kind)
    if kind in ("llama", "mixtral"):
        write_sentencepiece(tmp_path)
    out = tmp_path / "m.gguf"
    assert main(["convert", str(tmp_path), "-o", str(out), "--type", "Q8_0"]) == 0
    text = completion(out).stderr.lower()
    unwanted = [
        line
        for line in text.splitlines()
        if "unused tensor" in line or "missing" in line or "bad " in line
    ]
    assert not unwanted


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0"])
def test_same_types_and_no_larger_error_than_llama_quantize(kind, tmp_path):
    from gguf.quants import dequantize

    write_checkpoint(tmp_path, "qwen3moe")
    plain, ours, theirs = (tmp_path / n for n in ("f.gguf", "o.gguf", "t.gguf"))
    assert main(["convert", str(tmp_path), "-o", str(plain), "--type", "F32"]) == 0
    assert main(["quantize", str(plain), str(ours), kind]) == 0
    peer("llama-quantize", plain, theirs, kind)
    files = [GGUFFile.open(p).tensors for p in (plain, ours, theirs)]
    assert list(files[1]) == list(files[2])
    for name, x in files[0].items():
        a, b, c = (
            dequantize(f[name].data.reshape(-1, f[name].row_bytes), f[name].type).ravel()
            for f in files
        )
        assert files[1][name].type == files[2][name].type
        assert np.square(b - a).mean() <= np.square(c - a).mean(), name
        assert x.shape == files[1][name].shape


def test_importance_both_ways(tmp_path):
    model = write_small(tmp_path / "m.gguf")
    text = tmp_path / "t.txt"
    text.write_text("w1 w2 w3 some words, and bytes \u00e9 " * 60)
    ours, theirs = tmp_path / "o.gguf", tmp_path / "t.gguf"
    flags = ["-f", str(text), "-c", "64", "--chunks", "4"]
    assert main(["imatrix", str(model), "-o", str(ours), *flags]) == 0
    peer("llama-imatrix", "-m", model, "-o", theirs, *flags)
    a, b = load(ours).entries, load(theirs).entries
    assert a.keys() == b.keys()
    for name, entry in a.items():
        assert entry.counts.shape == b[name].counts.shape
        assert np.abs(entry.sum2 - b[name].sum2).sum() <= 0.1 * b[name].sum2.sum(), name
    peer(
        "llama-quantize",
        "--allow-requantize",
        "--imatrix",
        ours,
        model,
        tmp_path / "q.gguf",
        "Q4_0",
    )
    flags = ["--allow-requantize", "--imatrix", str(theirs)]
    assert main(["quantize", str(model), str(tmp_path / "q2.gguf"), "Q4_0", *flags]) == 0


def test_llama_gguf_split_joins_our_shards(tmp_path):
    model = tmp_path / "m.gguf"
    assert main(["quantize", str(write_small(tmp_path / "s.gguf")), str(model), "Q8_0"]) == 0
    assert main(["split", str(model), str(tmp_path / "p"), "--split-max-tensors", "6"]) == 0
    peer("llama-gguf-split", "--merge", sorted(tmp_path.glob("p-*"))[0], tmp_path / "back.gguf")
    a, b = (GGUFFile.open(p).tensors for p in (model, tmp_path / "back.gguf"))
    assert all(np.array_equal(t.data, b[n].data) for n, t in a.items())
    peer("llama-gguf-split", "--split", "--split-max-tensors", 6, model, tmp_path / "q")
    assert main(["merge", str(sorted(tmp_path.glob("q-*"))[0]), str(tmp_path / "back2.gguf")]) == 0
    assert (tmp_path / "back2.gguf").read_bytes() == model.read_bytes()
