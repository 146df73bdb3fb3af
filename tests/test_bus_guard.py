"""offload/bus_guard.py: a mapped file that is cut must not kill the process."""

import subprocess
import sys

import pytest
from tests.benchmarks.disk_model import TINY, Routing, write_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS guard is for Linux")

PLAIN = """
import os, sys, threading
import numpy as np
from gguf import GGMLQuantizationType as Q
from dali_gguf.errors import ModelFileError
from dali_gguf.offload.bus_guard import BusGuard
from dali_gguf.tensor import Tensor

path = sys.argv[1]
whole = np.memmap(path, np.uint8, "r")
tensors = {
    name: Tensor(name, Q.F32, (16384,), whole[i << 16 : i + 1 << 16], path, i << 16)
    for i, name in enumerate("abcd")
}
guard = BusGuard(tensors)
guard.check()
os.truncate(path, 70000)
thread = threading.Thread(target=lambda: tensors["c"].data.sum())
thread.start()
thread.join()
assert tensors["a"].data.sum() == 65536 and tensors["d"].data.sum() == 0
try:
    guard.check()
except ModelFileError as error:
    assert "tensor c at offset 131072" in str(error) and "70000" in str(error), error
    print("caught")
guard.close()
"""

FOREIGN = """
import os, sys
import numpy as np
from dali_gguf.offload.bus_guard import BusGuard
guard = BusGuard({})
other = np.memmap(sys.argv[1], np.uint8, "r")
os.truncate(sys.argv[1], 0)
other.sum()
"""

ENGINE = """
import os, sys
from dali_gguf.engine import Engine
from dali_gguf.errors import ModelFileError
from dali_gguf.sampler import SamplingParams
from tests.arena_device import ArenaDevice

engine = Engine(sys.argv[1], n_ctx=128, device=ArenaDevice())
assert not engine.memory.streams
running = engine.tokens([300, 301], SamplingParams(temperature=0, max_tokens=-2))
next(running)
os.truncate(sys.argv[1], 60000)
try:
    list(running)
except ModelFileError as error:
    assert "tensor" in str(error), error
    print("caught")
engine.close()
"""


def run(code, path):
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)


def test_zero_pages_and_an_error(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"\x01" * (4 << 16))
    done = run(PLAIN, path)
    assert done.returncode == 0 and done.stdout == "caught\n", done.stderr


def test_a_fault_elsewhere_stays_a_crash(tmp_path):
    path = tmp_path / "other.bin"
    path.write_bytes(bytes(100_000))
    assert run(FOREIGN, path).returncode < 0


def test_the_engine_says_which_tensor(tmp_path):
    path = tmp_path / "model.gguf"
    write_model(path, TINY, Routing())
    done = run(ENGINE, path)
    assert done.returncode == 0 and done.stdout == "caught\n", done.stderr
