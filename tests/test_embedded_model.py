"""The model in the package: its tensors are those of models/README.md, and it continues text."""

import hashlib
import re
from pathlib import Path

import dali_gguf.models
from dali_gguf import Engine, SamplingParams
from dali_gguf.engine import default_model
from dali_gguf.gguf_file import GGUFFile


def test_tensors_are_as_documented():
    readme = (Path(dali_gguf.models.__file__).parent / "README.md").read_text()
    documented = dict(re.findall(r"^([0-9a-f]{64})  (\S+weight)$", readme, re.MULTILINE))
    with GGUFFile.open(default_model()) as file:
        shipped = {hashlib.sha256(t.data.tobytes()).hexdigest(): n for n, t in file.tensors.items()}
    assert len(documented) == 8 * 12 + 2
    assert shipped == documented


def test_continues_a_speech():
    with Engine(n_ctx=256) as engine:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        text = "".join(engine.generate("My fellow citizens, the state of the", greedy))
        assert "Union" in text or "United States" in text
        again = "".join(engine.generate("My fellow citizens, the state of the", greedy))
        assert again == text
