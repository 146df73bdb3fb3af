"""Kernels compiled in several processes: shared out evenly, and really there afterwards."""

import os
import subprocess
import sys
from pathlib import Path

from gguf import GGMLQuantizationType as Q

from dali_gguf.kernels import ahead

ROOT = Path(__file__).parents[1]


def test_tasks_of_a_model():
    tasks = ahead.tasks_of([Q.F32, Q.Q4_K])
    assert set(tasks) == {"attention", "moe", "layer", "expand:F32", "matvec:F32", "expand:Q4_K",
                          "matvec:Q4_K", "matmat:Q4_K"}


def test_every_task_is_shared_out_once():
    tasks = ahead.tasks_of([Q.F32, Q.Q4_K, Q.Q6_K])
    parts = ahead.share(tasks, 3)
    assert sorted(sum(parts, [])) == sorted(tasks) and len(parts) == 3
    assert ahead.share(["layer"], 4) == [["layer"]]


def test_a_helper_process_compiles_its_part(tmp_path):
    """It is started as compile_all starts it, from a folder that is not the checkout's."""
    code = "from dali_gguf.kernels import ahead; p = ahead._start(['expand:Q8_0']); print(p.wait())"
    env = {**os.environ, "DALI_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr
    assert [p.name for p in tmp_path.rglob("*.done")] == ["expand-Q8_0.done"]
    assert any(tmp_path.rglob("*expand*.nbi"))


def test_what_is_not_ready_is_compiled_once_by_a_helper(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(ahead.kernels, "CACHE_DIR", tmp_path)
    monkeypatch.setattr(ahead, "_start", started.append)
    monkeypatch.setattr(ahead, "_helpers", {})
    assert not ahead.ready("program") and not ahead.ready("program")
    assert started == [["program"]]
    (tmp_path / "program.done").touch()
    assert ahead.ready("program")
