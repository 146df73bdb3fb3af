"""The names of the policies that a run uses, and which of them may be switched off."""

from dataclasses import dataclass

FEATURES = ("prefetch", "fills", "moves", "copies")
DYNAMIC = ("threshold", "greedy", "optimal", "balance")  # placements that may copy


@dataclass(frozen=True, slots=True)
class Choices:
    """verify: recompute everything on the CPU. adapt: only what pays stays on. named: the user
    asked for this placement, so that nothing of it is switched off."""

    placement: str = "threshold"
    prefetch: str = "residual"
    expert_cache: str = "decayed"
    verify: bool = False
    adapt: bool = True
    named: bool = False

    def candidates(self, predicts: bool) -> tuple[str, ...]:
        """Features that are tried on and off. predicts: there is a predictor."""
        names = {
            "prefetch": predicts,
            "fills": self.expert_cache != "static",
            "moves": self.placement == "threshold" and not self.named,
            "copies": self.placement in DYNAMIC and not self.named,
        }
        return tuple(name for name, possible in names.items() if self.adapt and possible)

    def always(self, feature: str) -> bool:
        """Whether the feature is on whatever a trial says."""
        if feature == "copies" and self.placement == "all-gpu":
            return True
        return not self.adapt or (self.named and feature in ("moves", "copies"))

    def line(self) -> str:
        """For the closing line."""
        return f"placement {self.placement}{' as asked' if self.named else ''}"
