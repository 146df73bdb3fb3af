"""What an expert arena counted."""

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class Counters:
    """hits + late + misses = uses. late: guessed, but not there in time. used + wasted <=
    hinted."""

    uses: int = 0
    hits: int = 0
    misses: int = 0
    late: int = 0
    evictions: int = 0
    hinted: int = 0
    hints_used: int = 0
    hints_wasted: int = 0
    hints_cancelled: int = 0
    filled: int = 0
    failed_guesses: int = 0

    def count(self, uses: int, hits: int, misses: int) -> None:
        """The experts of one layer of a step."""
        self.uses += uses
        self.hits += hits
        self.misses += misses
        self.late += uses - hits - misses


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot, or with `-` the difference of two. Bytes are those read, rounding to pages
    included."""

    uses: int
    hits: int
    misses: int
    late: int
    evictions: int
    hinted: int
    hints_used: int
    hints_wasted: int
    hints_cancelled: int
    filled: int
    failed_guesses: int
    wait_seconds: float
    bytes_read: int
    read_seconds: float
    short_reads: int
    slots: int
    arena_bytes: int
    direct: bool

    def __sub__(self, before: "ArenaStats") -> "ArenaStats":
        fixed = ("slots", "arena_bytes", "direct")
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in values.keys() - set(fixed):
            values[name] -= getattr(before, name)
        return ArenaStats(**values)

    @property
    def hit_rate(self) -> float:
        return self.hits / self.uses if self.uses else 1.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second while at least one read was under way."""
        return self.bytes_read / self.read_seconds if self.read_seconds > 0 else 0.0

    def as_dict(self, tokens: int) -> dict:
        """For --json: everything counted, and the figures of the closing line."""
        return {
            "disk": {f.name: getattr(self, f.name) for f in fields(self)}
            | {
                "hit_rate": round(self.hit_rate, 4),
                "gigabytes_per_second": round(self.bandwidth / 1e9, 3),
                "megabytes_per_token": round(self.bytes_read / max(tokens, 1) / 1e6, 2),
                "wait_ms_per_token": round(1e3 * self.wait_seconds / max(tokens, 1), 3),
            }
        }

    def line(self, tokens: int) -> str:
        """The closing line's figures: hits, speed of the disk, wait and bytes a token."""
        n = max(tokens, 1)
        how = "direct" if self.direct else "buffered"
        text = (
            f"disk: {100 * self.hit_rate:.0f}% hits of {self.uses}, "
            f"{self.bytes_read / n / 1e6:.0f} MB/token at {self.bandwidth / 1e9:.2f} GB/s {how}, "
            f"wait {1e3 * self.wait_seconds / n:.1f} ms/token"
        )
        if self.hinted:
            text += f", prefetch {self.hints_used} used {self.hints_wasted} wasted {self.late} late"
        return text


class Since:
    """What the arena counted in a run, though a scheduler may be made anew, with its arena."""

    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._before = self._last = scheduler.disk_stats()

    def now(self, scheduler) -> ArenaStats | None:
        """scheduler: the one in use now. None if it has no arena."""
        stats = scheduler.disk_stats()
        if stats is None:
            return None
        if scheduler is not self._scheduler:
            self._before = self._before - self._last
        self._scheduler, self._last = scheduler, stats
        return stats - self._before


def snapshot(counters: Counters, loads, slots) -> ArenaStats:
    """loads: loads.Loads or NativeLoads; slots: slots.Slots."""
    files = loads.files.values()
    return ArenaStats(
        **asdict(counters),
        wait_seconds=loads.wait_seconds,
        bytes_read=loads.bytes_read,
        read_seconds=loads.busy_seconds,
        short_reads=sum(f.short_reads for f in files),
        slots=slots.count,
        arena_bytes=slots.nbytes,
        direct=all(f.direct for f in files),
    )
