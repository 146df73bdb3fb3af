"""offload/read_queue.py: order, promotion, cancellation, errors."""

import threading
from queue import SimpleQueue

from dali_gguf.errors import ModelFileError
from dali_gguf.offload import read_queue
from dali_gguf.offload.read_queue import Read, ReadQueue


class Gate:
    """A file whose reads wait until the test lets them go, one by one."""

    def __init__(self):
        self.started: SimpleQueue[str] = SimpleQueue()
        self.go = threading.Semaphore(0)
        self.fail = ""

    def read(self, view, offset, nbytes, name):
        self.started.put(name)
        self.go.acquire()
        if name == self.fail:
            raise ModelFileError(f"{name} is bad")
        return nbytes


def make(names, threads=1):
    gate, ended = Gate(), SimpleQueue()
    reads = {name: Read(gate, 0, 100, memoryview(b""), name, i) for i, name in enumerate(names)}
    return gate, ended, reads, ReadQueue(ended.put, threads)


def finish(gate, queue, ended, count):
    gate.go.release(100)
    names = [ended.get(timeout=5).name for _ in range(count)]
    queue.close()
    return names


def test_demanded_reads_pass_guesses():
    gate, ended, r, queue = make("abcd")
    queue.demand([r["a"]])
    assert gate.started.get(timeout=5) == "a"
    queue.guess([r["b"], r["c"]])
    queue.demand([r["d"]])
    assert finish(gate, queue, ended, 4) == ["a", "d", "b", "c"]
    assert queue.bytes_read == 400 and queue.busy_seconds > 0 and queue.idle


def test_a_guess_that_is_demanded_moves_up_and_is_read_once():
    gate, ended, r, queue = make("abc")
    queue.demand([r["a"]])
    assert gate.started.get(timeout=5) == "a"
    queue.guess([r["b"], r["c"]])
    queue.demand([r["c"]])
    assert finish(gate, queue, ended, 3) == ["a", "c", "b"]
    assert queue.bytes_read == 300


def test_cancelling_takes_back_all_or_nothing():
    gate, ended, r, queue = make("abcd")
    queue.guess([r["a"], r["b"], r["c"], r["d"]])
    assert gate.started.get(timeout=5) == "a"
    assert not queue.cancel([r["a"], r["b"]])
    assert queue.cancel([r["b"], r["c"]])
    assert finish(gate, queue, ended, 2) == ["a", "d"]


def test_guesses_never_hold_all_threads(monkeypatch):
    monkeypatch.setattr(read_queue, "MOST_GUESSES", 2)
    gate, ended, r, queue = make("abcdefgh", threads=4)
    queue.guess([r[name] for name in "abcdefg"])
    first = {gate.started.get(timeout=5) for _ in range(2)}
    assert first == set("ab") and queue.idle
    queue.demand([r["h"]])
    assert gate.started.get(timeout=5) == "h" and not queue.idle
    assert sorted(finish(gate, queue, ended, 8)) == list("abcdefgh")


def test_an_error_stays_with_its_read():
    gate, ended, r, queue = make("ab")
    gate.fail = "a"
    queue.demand([r["a"], r["b"]])
    assert finish(gate, queue, ended, 2) == ["a", "b"]
    assert "a is bad" in str(r["a"].error) and r["b"].error is None
    assert queue.bytes_read == 100
