"""Stop texts, also when they are spread over pieces."""

import pytest

from dali_gguf.stopping import StopFilter, overlap


def run(stops, pieces):
    stop, shown = StopFilter(stops), ""
    for piece in pieces:
        shown += stop.push(piece)
        if stop.stopped:
            return shown, True
    return shown + stop.finish(), False


@pytest.mark.parametrize(
    "stops, text, shown, stopped",
    [
        ([], "hello", "hello", False),
        (["lo"], "hello world", "hel", True),
        (["world", "lo w"], "hello world", "hel", True),
        (["xyz"], "hello xy", "hello xy", False),
        (["aab"], "aaab", "a", True),
        (["\n\n"], "a\nb\n\nc", "a\nb", True),
    ],
)
def test_the_same_however_the_text_is_cut(stops, text, shown, stopped):
    for cut in range(1, len(text) + 1):
        pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
        assert run(stops, pieces) == (shown, stopped)


def test_nothing_is_kept_back_without_need():
    stop = StopFilter(["END"])
    assert stop.push("abc") == "abc" and stop.push("xE") == "x" and stop.push("x") == "Ex"


def test_overlap():
    assert overlap("abca", "abc") == 1 and overlap("abc", "abc") == 0 and overlap("", "a") == 0
