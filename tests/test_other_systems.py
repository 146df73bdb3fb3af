"""The disk tier without Linux: what macOS and Windows lack is taken away, and it reads right."""

import subprocess
import sys
import textwrap

import pytest

WORK = """
import ctypes, numpy as np
from pathlib import Path
from dali_gguf.offload import (
    arena, budget, direct_io, disk_forecast, disk_scheduler, disk_tier, memory_plan, resident,
)
from tests.expert_files import model

layers = model(Path(sys.argv[1]))
a = arena.ExpertArena(layers, 300_000)
for step in range(6):
    for layer, experts in layers.items():
        for ids in a.need(layer, np.array([step % 8, 5]), np.ones(2, np.int64)):
            for e in ids.tolist():
                for role, t in enumerate(experts.matrices(e)):
                    at = int(a.addresses(layer)[role, e])
                    assert ctypes.string_at(at, t.nbytes) == t.data.tobytes()
s = a.stats()
assert s.misses and s.hits and not s.direct
a.close()
print("fine")
"""

WINDOWS = """
import sys, os, mmap, json, threading, numba, gguf
for name in ("preadv", "pread", "O_DIRECT", "posix_fadvise", "SEEK_HOLE", "sysconf"):
    delattr(os, name)
os.O_BINARY = 0
for name in [n for n in dir(mmap) if n.startswith(("MAP_", "MADV_"))]:
    delattr(mmap, name)
sys.modules["fcntl"] = None
sys.platform = "win32"
"""

MACOS = """
import sys, os, mmap, json, threading, numba, gguf, fcntl
for name in ("O_DIRECT", "posix_fadvise"):
    delattr(os, name)
for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
    delattr(mmap, name)
asked = []
fcntl.fcntl = lambda fd, what, value=0: asked.append(what)
sys.platform = "darwin"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pretends from Linux")
@pytest.mark.parametrize("system", [WINDOWS, MACOS], ids=["windows", "macos"])
def test_imports_and_reads(tmp_path, system):
    code = textwrap.dedent(system + WORK)
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr[-1500:]
