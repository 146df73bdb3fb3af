"""The folders that pip installs are the folders there are, and nobody imports them bare."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = {"dali_gguf": "dali_gguf", "kernels": "dali_gguf.kernels", "convert": "dali_gguf.convert",
         "models": "dali_gguf.models"}


def pyproject() -> dict:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11 on
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_is_packaged():
    found = set()
    for folder, package in TREES.items():
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))
    assert found == set(pyproject()["tool"]["setuptools"]["packages"])


def test_data_files_are_packaged():
    data = pyproject()["tool"]["setuptools"]["package-data"]
    for folder, package in TREES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".toml", ".gguf", ".txt") and "__pycache__" not in path.parts:
                inner = path.relative_to(ROOT / folder)
                owners = [n for n in data if n == package or n.startswith(package + ".")]
                patterns = [(n.removeprefix(package).lstrip(".").replace(".", "/"), p)
                            for n in owners for p in data[n]]
                assert any(inner.match(f"{at}/{p}".lstrip("/")) for at, p in patterns), path


def test_no_bare_imports():
    for path in ROOT.rglob("*.py"):
        if ".venv" in path.parts or "build" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                assert name.split(".")[0] not in ("kernels", "convert", "models"), f"{path}: {name}"


def test_import_stays_light():
    code = "import sys, dali_gguf, dali_gguf.cli; print({'torch', 'numba'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
