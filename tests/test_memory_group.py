"""The disk tier inside a memory group: the budget it finds is never exceeded (that would be a
kill)."""

import json
import subprocess
import sys

import pytest

from tests.benchmarks.disk_model import UNIFORM, Shape, write_model
from tests.memory_group import MemoryGroup

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not MemoryGroup.usable(), reason="needs root and a writable memory group"),
]

CHILD = """
import json, sys
import numpy as np
from gguf import GGMLQuantizationType as Q
from dali_gguf.offload import budget
from dali_gguf.offload.arena import ExpertArena
from dali_gguf.routing import LayerExperts
from dali_gguf.tensor import Tensor

path, n_layer, n_expert, nbytes, direct = sys.argv[1], 4, 16, 1 << 20, sys.argv[2] == "direct"
def matrix(i):
    data = np.broadcast_to(np.uint8(0), nbytes)
    return Tensor(f"m{i}", Q.F32, (512, 512), data, path, 512 + i * nbytes)
layers = {}
for layer in range(n_layer):
    first = layer * 3 * n_expert
    starts = [first + role * n_expert for role in range(3)]
    roles = [tuple(matrix(start + e) for e in range(n_expert)) for start in starts]
    layers[layer] = LayerExperts(layer, *roles)
def work(arena):
    for step in range(8):
        for layer in layers:
            ids = np.arange(n_expert) if step % 4 == 3 else np.arange(4) + step
            for _ in arena.need(layer, ids, np.ones(len(ids), np.int64), frozen=step % 4 == 3):
                pass
tiny = ExpertArena(layers, 8 * 3200 * 1024)
work(tiny)
tiny.close()
room = budget.available()
arena = ExpertArena(layers, room.nbytes * 95 // 100, direct=direct)
arena.fill()
arena.wait_idle()
work(arena)
s = arena.stats()
print(json.dumps({"source": room.source, "arena": s.arena_bytes, "misses": s.misses, "hits": s.hits,
                  "everything": 3 * nbytes * n_layer * n_expert, "direct": s.direct}))
"""


@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_the_arena_fits_the_room_that_the_group_leaves(tmp_path, way):
    path = tmp_path / "experts.bin"
    with open(path, "wb") as file:
        file.truncate(512 + (4 * 16 * 3 << 20))
    with MemoryGroup("arena", 160 << 20) as group:
        command = [sys.executable, "-c", CHILD, str(path), way]
        done = group.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (done.returncode, done.stderr[-500:])
        assert group.kills == 0 and group.peak <= group.limit
    result = json.loads(done.stdout)
    assert "dali-arena" in result["source"]
    assert result["arena"] < result["everything"]
    assert result["misses"] > 0, "nothing was missed: the limit did not bind"


MODEL_CHILD = """
import json, sys
from itertools import islice
from dali_gguf.engine import Engine
from dali_gguf.sampler import SamplingParams

with Engine(sys.argv[1], n_ctx=128) as engine:
    running = engine.tokens(list(range(300, 310)), SamplingParams(temperature=0, max_tokens=-2))
    text, s = list(islice(running, 40)), engine.scheduler.disk_stats()
    misses, mark = s.misses if s else None, engine.stats.logits_hash
    print(json.dumps({"text": text, "misses": misses, "hash": mark}))
"""


def test_a_model_under_a_limit_gives_the_same_text(tmp_path):
    path = tmp_path / "model.gguf"
    shape = Shape(n_embd=1024, n_layer=4, n_head=8, n_head_kv=2, n_expert=64, n_ff=512,
                  n_vocab=2048)
    write_model(path, shape, UNIFORM)
    command = [sys.executable, "-c", MODEL_CHILD, str(path)]
    free = subprocess.run(command, capture_output=True, text=True, check=True)
    with MemoryGroup("model", 480 << 20) as group:
        done = group.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr[-500:])
        assert group.kills == 0 and group.peak <= group.limit
    expected, limited = json.loads(free.stdout), json.loads(done.stdout)
    assert expected["misses"] is None, "without a limit everything is in memory"
    assert limited["misses"] > 0, "nothing was missed: the limit did not bind"
    assert (limited["text"], limited["hash"]) == (expected["text"], expected["hash"])


GPU_CHILD = """
import json, sys
from itertools import islice
from dali_gguf.engine import Engine
from dali_gguf.offload import gpu_measure
from dali_gguf.offload.cost import CostModel
from dali_gguf.sampler import SamplingParams

gpu_measure.measure = lambda *_: CostModel([1, 2], [900, 1200], [40, 45], copy_us=60, t_disk=100)
options = dict(device="cpu-torch", vram=sys.argv[2]) if len(sys.argv) > 2 else {}
with Engine(sys.argv[1], n_ctx=128, n_batch=64, **options) as engine:
    running = engine.tokens(list(range(300, 310)), SamplingParams(temperature=0, max_tokens=-2))
    text, scheduler = list(islice(running, 40)), engine.scheduler
    copies = scheduler.counters.total("from_disk") if options else 0
    s = scheduler.disk_stats()
    print(json.dumps({"text": text, "copies": copies, "misses": s.misses if s else None}))
"""


def test_a_gpu_beside_too_little_memory_stays_within_the_limit(tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "model.gguf"
    shape = Shape(n_embd=1024, n_layer=8, n_head=8, n_head_kv=2, n_expert=64, n_ff=512,
                  n_vocab=2048)
    write_model(path, shape, UNIFORM)
    command = [sys.executable, "-c", GPU_CHILD, str(path)]
    free = subprocess.run(command, capture_output=True, text=True, check=True)
    with MemoryGroup("gpu", 680 << 20) as group:
        done = group.run([*command, "200M"], capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr[-500:])
        assert group.kills == 0 and group.peak <= group.limit
    expected, limited = json.loads(free.stdout), json.loads(done.stdout)
    assert limited["misses"] > 0 and limited["copies"] > 0, "the limit did not bind"
    assert limited["text"] == expected["text"]
