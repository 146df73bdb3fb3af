"""bench refuses what it cannot measure before it opens the model; one row a test."""

import json

import pytest

from dali_gguf.cli import bench, main
from tests.small_gguf import write_small


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_small(tmp_path_factory.mktemp("bench") / "small.gguf"))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("-p 0 -n 0", "no test"),
        ("-p 0 -n 4 -npl 0", "no test"),
        ("-p 0,0 -n 0", "no test"),
        ("-b 0", "at least 1"),
        ("-t 1,0", "at least 1"),
        ("-p 65 -n 0", "a test of 65 tokens: the model's context has room for 64"),
        ("-p 0 -n 1,70", "a test of 70 tokens"),
    ],
)
def test_nothing_to_measure(path, capsys, monkeypatch, arguments, expected):
    monkeypatch.setattr(bench, "Engine", lambda *_, **__: pytest.fail("opened"))
    assert main(["bench", path, *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err and err.count("\n") == 1


def test_too_many_threads(path, capsys):
    assert main(["bench", path, "-p", "8", "-n", "0", "-t", "100000"]) == 2
    assert capsys.readouterr().err == "dali-gguf: 100000 threads: expected at most 512\n"


def test_a_row_for_each_test(path, capsys):
    numbers = ["-p", "64,0", "-n", "3", "-npl", "1,2", "-r", "1", "-t", "1", "--json"]
    assert main(["bench", path, *numbers]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["test"] for row in rows] == ["pp64", "tg3", "tg3 x2"]
