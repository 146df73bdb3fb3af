"""Stop texts: watches the stream and keeps back what could be the beginning of one."""

from collections.abc import Iterable


class StopFilter:
    """push(text) gives what may be shown; stopped is True once a stop text was seen."""

    def __init__(self, stops: Iterable[str]):
        self.stops = tuple(stops)
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was kept back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop, shorter than stop."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
