"""What can be known about the GPU path without a GPU: the check skips, and its kernels compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]


def run(*command: str, **more: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | more
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tests/gpu_check.py")
def test_skips_without_a_gpu():
    done = run("tests/gpu_check.py")
    assert (done.returncode, done.stdout) == (0, "skipped: no CUDA device\n"), done.stderr


@pytest.mark.slow
def test_dry_run():
    pytest.importorskip("triton")
    done = run("tests/gpu_check.py", "--dry-run")
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr


def test_kernels_compile_for_the_smallest_gpu():
    pytest.importorskip("triton")
    done = run("-m", "tests.triton_compile", "75", "Q4_K")
    assert done.returncode == 0 and done.stdout.count("ok") == 2, done.stdout + done.stderr


@pytest.mark.slow
def test_kernels_compile_for_gpus():
    """Down to machine code for Turing, Ampere and Hopper, with the compiler Triton brings."""
    pytest.importorskip("triton")
    done = run("-m", "tests.triton_compile")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 3 * 8 * 2
    wide = [line for line in done.stdout.splitlines() if "Q4_K vector" in line]
    assert all("v2.b32" in line for line in wide), "weights are read eight bytes at a time"
