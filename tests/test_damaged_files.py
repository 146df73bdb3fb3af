"""2,000 damaged files: never a traceback, a hang, or a crash of the interpreter."""

import random
import struct

import pytest
from dali_gguf.kernels.cpu import CpuDevice

from dali_gguf.engine import Engine
from dali_gguf.errors import DaliError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.sampler import SamplingParams
from tests.small_gguf import write_small

PROMPT = [40, 200, 17]


def mutated(content: bytes, header: int, rng: random.Random) -> bytes:
    """One damage: mostly in the header, where it matters."""
    at = rng.randrange(header) if rng.random() < 0.9 else rng.randrange(len(content))
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    if kind == 2:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == 3:
        return content[:at] + rng.randbytes(rng.randrange(1, 9)) + content[at:]
    if kind == 4:
        return content[:at] + content[at + rng.randrange(1, 9) :]
    odd = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
    return content[:at] + struct.pack("<Q", rng.choice(odd)) + content[at + 8 :]


@pytest.mark.filterwarnings("ignore")
def test_2000_damaged_files(tmp_path):
    """Each opens and answers, or gives one DaliError of one line. Seeded: a failure repeats."""
    whole = write_small(tmp_path / "whole.gguf")
    content = whole.read_bytes()
    header = min(t.offset for t in GGUFFile.open(whole).tensors.values())
    rng, damaged, failures = random.Random(5), tmp_path / "damaged.gguf", 0
    cpu = CpuDevice(1)
    for _ in range(2000):
        damaged.write_bytes(mutated(content, header, rng))
        try:
            with Engine(damaged, device=cpu, n_ctx=16) as engine:
                engine.logits(PROMPT)
                list(engine.generate(PROMPT, SamplingParams(max_tokens=1)))
        except DaliError as error:
            failures += 1
            assert "\n" not in str(error)
    cpu.close()
    assert 200 < failures < 2000
