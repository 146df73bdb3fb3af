"""The merging both vocabulary kinds share: the best neighbouring pair first, leftmost on ties."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush


def merge(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """symbols after all merges. rank(left, right): lower goes first, None does not merge.

    The same order as llama.cpp's tokenizers: a heap of (rank, position of the left symbol); a
    pair is out of date when its length is no longer that of the two symbols.
    """
    text = list(symbols)
    following = list(range(1, len(text))) + [-1]
    previous = list(range(-1, len(text) - 1))
    heap = []

    def offer(left: int, right: int) -> tuple[float, int, int] | None:
        found = rank(text[left], text[right])
        return None if found is None else (found, left, len(text[left]) + len(text[right]))

    for i in range(len(text) - 1):
        if pair := offer(i, i + 1):
            heap.append(pair)
    heapify(heap)
    while heap:
        _, left, size = heappop(heap)
        right = following[left]
        if not text[left] or right < 0 or len(text[left]) + len(text[right]) != size:
            continue
        text[left] += text[right]
        text[right] = ""
        following[left] = following[right]
        if following[left] >= 0:
            previous[following[left]] = left
            if pair := offer(left, following[left]):
                heappush(heap, pair)
        if previous[left] >= 0 and (pair := offer(previous[left], left)):
            heappush(heap, pair)
    return [piece for piece in text if piece]
