"""The tokenize command."""

import io
import json

import pytest

from dali_gguf.cli import main
from tests import vocabularies


@pytest.fixture
def path(tmp_path):
    return str(vocabularies.write(tmp_path / "v.gguf", vocabularies.metadata("spm")))


def test_ids(path, capsys):
    assert main(["tokenize", path, "-p", "Hello <s>", "--ids"]) == 0
    with_special = json.loads(capsys.readouterr().out)
    assert main(["tokenize", path, "-p", "Hello <s>", "--ids", "--no-special"]) == 0
    without = json.loads(capsys.readouterr().out)
    assert with_special[0] == 1 and with_special[-1] == 1
    assert 1 not in without and len(without) > len(with_special) - 2


def test_a_line_a_token(path, capsys):
    assert main(["tokenize", path, "-p", "a é🦙"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "     1 -> '<s>'"
    assert any(line.endswith(r"-> b'\xf0'") for line in lines)


def test_text_from_stdin(path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["tokenize", path, "--ids"]) == 0
    ids = json.loads(capsys.readouterr().out)
    assert main(["tokenize", path, "-p", "Hello\n", "--ids"]) == 0
    assert json.loads(capsys.readouterr().out) == ids


def test_unknown_pre_tokenizer_is_one_line(tmp_path, capsys):
    keys = vocabularies.metadata("bpe", pre="surprise")
    path = str(vocabularies.write(tmp_path / "odd.gguf", keys))
    assert main(["tokenize", path, "-p", "a", "--ids"]) == 0
    error = capsys.readouterr().err
    assert (
        error.startswith("dali-gguf: warning: ")
        and "'surprise'" in error
        and error.count("\n") == 1
    )


def test_errors(tmp_path, capsys):
    assert main(["tokenize", str(tmp_path / "none.gguf"), "-p", "a"]) == 2
    assert "no such file" in capsys.readouterr().err
    path = str(vocabularies.write(tmp_path / "t5.gguf", vocabularies.metadata("bpe", model="t5")))
    assert main(["tokenize", path, "-p", "a"]) == 2
    assert "tokenizer model 't5'" in capsys.readouterr().err
