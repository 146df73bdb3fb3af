"""What a step uses of what may be switched off, and how fast the steps were."""

import time
from collections import deque

from dali_gguf.offload.choices import FEATURES, Choices
from dali_gguf.offload.cost import CostModel
from dali_gguf.offload.pays import RECENT, Pays

NEVER = 1.0  # a margin that no move of a resident can reach


class StepFeatures:
    """on: features of this step, by name. margin: predicted gain from which residents move.
    recent_us: of decode steps. tokens: of this step."""

    def __init__(self, choices: Choices, predicts: bool, model: CostModel):
        """predicts: there is a predictor."""
        self.choices, self.model = choices, model
        self.pays = Pays(choices.candidates(predicts))
        self.recent_us: deque[float] = deque(maxlen=RECENT)
        self.on, self.margin, self.tokens = self._features(), NEVER, 0
        self._began = time.perf_counter()

    def _features(self) -> set[str]:
        return {f for f in FEATURES if self.choices.always(f) or self.pays.enabled(f)}

    def begin(self, tokens: int, prefill: bool) -> None:
        """A step of so many tokens begins: the last one is over."""
        now = time.perf_counter()
        if tokens == self.tokens and not prefill:
            us = (now - self._began) * 1e6
            self.pays.record(us, tokens)
            self.recent_us.append(us)
        self._began, self.tokens = now, tokens
        self.on = self._features()
        self.margin = self.model.margin() if "moves" in self.on else NEVER
