"""Only if it pays: features go on and off in short blocks and are kept only if steps get faster.

Of every 96 decode steps 32 are a trial of one feature, in turn: four steps with it, four without.
It stays on if the median step with it takes less than 0.995 of one without. Pure: times in,
decisions out.
"""

import numpy as np

BLOCK, TRIAL, PERIOD = 4, 32, 96
NEEDED = 0.995
RECENT = 24  # decode steps whose median stands for a split of the experts


class Pays:
    """features: names that are on at the start. Every decode step: enabled(name).., then record."""

    def __init__(self, features: tuple[str, ...]):
        self.on = dict.fromkeys(features, True)
        self.trials = dict.fromkeys(features, 0)
        self._names = features
        self._turn = 0
        self._at = 0  # step within the period
        self._tokens = 0
        self._times: tuple[list[float], list[float]] = ([], [])  # without, with

    def enabled(self, name: str) -> bool:
        """Whether this step uses the feature. False for one that was never a candidate."""
        if self._names and self._at < TRIAL and name == self._names[self._turn]:
            return self._at // BLOCK % 2 == 0
        return self.on.get(name, False)

    def record(self, us: float, tokens: int) -> None:
        """One step took us microseconds for so many tokens; a change of tokens starts anew."""
        if not self._names:
            return
        if tokens != self._tokens:
            self._tokens = tokens
            self._restart()
            return
        if self._at < TRIAL and self._at % BLOCK:  # the first step of a block pays for the change
            self._times[self._at // BLOCK % 2 == 0].append(us)
        self._at += 1
        if self._at == TRIAL:
            self._decide()
        if self._at == PERIOD:
            self._turn = (self._turn + 1) % len(self._names)
            self._restart()

    def _decide(self) -> None:
        name = self._names[self._turn]
        without, using = (float(np.median(times)) for times in self._times)
        self.on[name] = using < NEEDED * without
        self.trials[name] += 1

    def _restart(self) -> None:
        self._at, self._times = 0, ([], [])

    def nothing_pays(self) -> bool:
        """Every feature has had a trial and none is on."""
        return bool(self._names) and all(self.trials.values()) and not any(self.on.values())

    def line(self) -> str:
        """What was kept, for the closing line; empty before the first trial."""
        tried = [n for n in self._names if self.trials[n]]
        kept = [n for n in tried if self.on[n]]
        dropped = [n for n in tried if not self.on[n]]
        parts = [f"kept {', '.join(kept)}"] if kept else []
        return "; ".join(parts + ([f"off {', '.join(dropped)}"] if dropped else []))
