"""What `dali-gguf warmup` found out about AMX on this machine: a small file beside the kernels.

A file that is missing or damaged, or that another processor or another version wrote, counts as
"not used": then every product runs without AMX.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import llvmlite
import numba

from dali_gguf import kernels
from dali_gguf.kernels import isa
from dali_gguf.replacing import replacing

ENOUGH = 1.05  # times as fast: from there on AMX is used


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one weight type: same bits as without AMX, and how many times as fast. What could not be
    measured is not right."""

    right: bool
    speedup: float

    @property
    def good(self) -> bool:
        return self.right and self.speedup >= ENOUGH


FAILED = Verdict(False, 0.0)


def path() -> Path:
    """The folder's name stands for the sources of the kernels and the set of instructions."""
    return kernels.CACHE_DIR / "amx.json"


def machine() -> str:
    versions = f"numba {numba.__version__}, llvmlite {llvmlite.__version__}"
    return f"{isa.cpu_name()}, {' '.join(sorted(isa.FEATURES))}, {versions}"


def read() -> dict[str, Verdict]:
    """Verdicts by the type's name; none if the file does not hold this machine's."""
    try:
        data = json.loads(path().read_text(encoding="utf-8"))
        if data["machine"] != machine():
            return {}
        return {name: checked(**entry) for name, entry in data["types"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def checked(right: bool, speedup: float) -> Verdict:
    """Of values that come from outside."""
    if not isinstance(right, bool) or not isinstance(speedup, float):
        raise ValueError(f"not a verdict: {right!r}, {speedup!r}")
    return Verdict(right, speedup)


def write(verdicts: dict[str, Verdict]) -> None:
    types = {name: asdict(verdict) for name, verdict in sorted(verdicts.items())}
    text = json.dumps({"machine": machine(), "types": types}, indent=1)
    with replacing(path()) as part:
        part.write_text(text, encoding="utf-8")


@cache
def _read_once() -> dict[str, Verdict]:
    return read()


def used(type_name: str) -> bool:
    """Whether products with weights of a type run on AMX in this process."""
    return isa.AMX and _read_once().get(type_name, FAILED).good
