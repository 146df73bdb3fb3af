"""Is something worth it? Switched on and off in short blocks of steps, kept only if steps get
faster."""

import numpy as np

BLOCK = 4  # steps; the first of a block still feels the one before and is not counted
BLOCKS = 8  # of a trial, alternating off and on
WARM = 16  # steps before the first trial, to learn in
HOLD = 256  # steps until the next trial
GAIN = 0.995  # of the time without, that it must not exceed


class Trial:
    """Call step(seconds) after each step; `on` says what the next one should do."""

    def __init__(self):
        self.on = False
        self.kept: bool | None = None  # outcome of the last trial; None: none has ended
        self._position = -WARM
        self._times: tuple[list[float], list[float]] = ([], [])

    @property
    def learning(self) -> bool:
        """The first steps: what will be tried gets ready, without acting."""
        return self._position < 0

    def step(self, seconds: float) -> None:
        if self._position >= BLOCK * BLOCKS:  # between two trials
            self._position += 1
            if self._position >= BLOCK * BLOCKS + HOLD:
                self._position, self._times = 0, ([], [])
                self.on = False
            return
        if self._position >= 0 and self._position % BLOCK:
            self._times[self.on].append(seconds)
        self._position += 1
        self.on = self._position >= 0 and bool(self._position // BLOCK % 2)
        if self._position == BLOCK * BLOCKS:
            without, with_it = (float(np.median(times)) for times in self._times)
            self.on = self.kept = with_it < GAIN * without
