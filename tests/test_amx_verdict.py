"""When AMX is used: only what was found right and faster here, by a process that may crash."""

import json

import pytest
from gguf import GGMLQuantizationType as Q

from dali_gguf import kernels
from dali_gguf.cli import warmup
from dali_gguf.kernels import amx_check, amx_verdict, formats, isa
from dali_gguf.kernels.amx_verdict import FAILED, Verdict

GOOD = Verdict(True, 1.2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An AMX machine whose cache is new."""
    monkeypatch.setattr(kernels, "CACHE_DIR", tmp_path / "new")
    monkeypatch.setattr(isa, "AMX", True)
    amx_verdict._read_once.cache_clear()
    yield tmp_path / "new"
    amx_verdict._read_once.cache_clear()


def test_what_was_written_is_read():
    found = {"Q4_K": GOOD, "Q6_K": Verdict(True, 0.8), "Q8_0": FAILED}
    amx_verdict.write(found)
    assert amx_verdict.read() == found
    assert [amx_verdict.used(name) for name in (*found, "Q4_0")] == [True, False, False, False]


@pytest.mark.parametrize("verdict, used", [
    (Verdict(True, 1.05), True), (Verdict(True, 1.049), False), (Verdict(False, 2.0), False),
    (Verdict(True, float("nan")), False), (FAILED, False),
])
def test_right_and_faster(verdict, used):
    amx_verdict.write({"Q4_K": verdict})
    assert amx_verdict.used("Q4_K") == used


def test_without_amx_nothing_is_read(monkeypatch):
    amx_verdict.write({"Q4_K": GOOD})
    monkeypatch.setattr(isa, "AMX", False)
    assert not amx_verdict.used("Q4_K")


def test_a_missing_file_means_not_used():
    assert amx_verdict.read() == {} and not amx_verdict.used("Q4_K")


@pytest.mark.parametrize("change", [
    lambda text: "", lambda text: text[:-20], lambda text: "[]", lambda text: "7",
    lambda text: text.replace("true", "1"), lambda text: text.replace("1.2", '"1.2"'),
    lambda text: text.replace("speedup", "sped"), lambda text: text.replace("types", "kinds"),
    lambda text: text.replace('"machine": "', '"machine": "not '),
    lambda text: json.dumps({**json.loads(text), "types": [1]}),
    lambda text: "\x00\xff", lambda text: "[" * 100_000,
])
def test_a_damaged_file_means_not_used(change):
    amx_verdict.write({"Q4_K": GOOD})
    text = amx_verdict.path().read_text()
    amx_verdict.path().write_bytes(change(text).encode("latin-1"))
    assert amx_verdict.read() == {} and not amx_verdict.used("Q4_K")


def test_the_product_goes_by_the_verdict(monkeypatch):
    monkeypatch.setattr(formats, "_product", lambda fmt, name: name)
    amx_verdict.write({"Q4_K": GOOD, "Q6_K": FAILED})
    names = [formats.matmat_address(formats.FORMATS[t]) for t in (Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.F16)]
    assert names == ["matmat_amx", "matmat", "matmat", "matvec"]


@pytest.mark.parametrize("code, verdict", [
    ("print('{\"right\": true, \"speedup\": 1.2}')", GOOD),
    ("print('a warning'); print('{\"right\": true, \"speedup\": 1.2}')", GOOD),
    ("import os; os.kill(os.getpid(), 4)", FAILED),
    ("print('{\"right\": true, \"speedup\": 1.2}', flush=True); import os; os.abort()", FAILED),
    ("raise SystemExit(1)", FAILED), ("pass", FAILED), ("print('{')", FAILED),
    ("print('[1]')", FAILED), ("print('{\"right\": 1, \"speedup\": 1.2}')", FAILED),
], ids=range(9))
def test_a_process_that_fails_means_not_used(code, verdict):
    assert amx_check.ask(["-c", code]) == verdict


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(amx_check, "SECONDS", 0.5)
    assert amx_check.ask(["-c", "import time; time.sleep(60)"]) == FAILED


def test_a_machine_without_amx_answers(monkeypatch):
    monkeypatch.setattr(isa, "AMX", False)
    assert amx_check.check(formats.FORMATS[Q.Q4_K]) == FAILED


def test_findings_are_added_and_told(monkeypatch):
    answers = {"Q4_K": GOOD, "Q6_K": Verdict(True, 0.8), "Q8_0": FAILED}
    monkeypatch.setattr(amx_check, "ask", lambda arguments: answers[arguments[-1]])
    amx_verdict.write({"Q4_0": GOOD, "Q8_0": GOOD})
    found = amx_check.find_out([Q.Q8_0, Q.Q6_K, Q.Q4_K, Q.F32])
    assert amx_verdict.read() == {"Q4_0": GOOD, **answers}
    assert amx_check.summary(found) == (
        "AMX: used for Q4_K (1.20x), not for Q6_K (0.80x), Q8_0 (not right)"
    )
    assert amx_check.summary({"Q4_K": GOOD}) == "AMX: used for Q4_K (1.20x)"
    assert amx_check.summary({"Q4_K": FAILED}) == "AMX: not for Q4_K (not right)"


@pytest.mark.parametrize("present", [True, False])
def test_warmup_tries_it_where_it_is(present, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(isa, "AMX", present)
    monkeypatch.setattr(amx_check, "ask", lambda arguments: asked.append(arguments[-1]) or GOOD)
    warmup.try_tiles({Q.Q4_K, Q.F32})
    assert asked == (["Q4_K"] if present else [])
    said = "dali-gguf: AMX: used for Q4_K (1.20x)\n" if present else ""
    assert capsys.readouterr().err == said
