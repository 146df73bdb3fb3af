"""How much memory the model may take, and whether it fits.

A Linux process is bound by the machine (MemAvailable) and by every memory group above it; going
over a group's limit is a SIGKILL without an error to catch, so all of them are read and the least
one counts.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dali_gguf.errors import InputError, MemoryBudgetError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MACHINE = "memory available on this machine"
NO_LIMIT = 1 << 60  # version 1 says "no limit" with a number near 2^63


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that can still be taken, and where the number comes from (for messages). taken: bytes
    in use already that the user's number includes."""

    nbytes: int
    source: str
    taken: int = 0


def parse_size(text: str) -> int:
    """Bytes of "6G", "800M", "1.5GiB", "6GB" or a plain number; units are powers of 1024."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if not found or float(found[1]) == 0:
        raise InputError(f"memory size {text!r} is not a number and a unit: write 6G, 800M or 1.5G")
    return int(float(found[1]) * UNITS[found[2]])


def show_size(nbytes: float) -> str:
    """A size as people write it: 6.0G, 812M."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.1f}G"
    return f"{max(1, round(nbytes / (1 << 20)))}M"


def available(root: Path = Path("/")) -> Room:
    """What this process can still take without an out-of-memory kill. root: for tests."""
    if sys.platform.startswith("linux") or root != Path("/"):
        machine = Room(_mem_available(root), MACHINE)
        return min([machine, *_group_rooms(root)], key=lambda room: room.nbytes)
    if sys.platform == "win32":
        return Room(_windows_available(), MACHINE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Room(pages * 7 // 10, "70% of this machine's memory")


def resident(root: Path = Path("/")) -> int:
    """Bytes of anonymous memory this process holds now (0 where the system does not say)."""
    return _table(root / "proc/self/status").get("RssAnon", 0) * 1024


def _mem_available(root: Path) -> int:
    table = _table(root / "proc/meminfo")
    if "MemAvailable" not in table:
        raise MemoryBudgetError("/proc/meminfo has no MemAvailable: give the budget with --ram 6G")
    return table["MemAvailable"] * 1024


def _group_rooms(root: Path) -> Iterator[Room]:
    """What each group leaves. File cache counts as free, but not mapped pages: they are programs
    and libraries in use, and would be read again at once."""
    for version, folder in _groups(root):
        stat = _table(folder / "memory.stat")
        if version == 2:
            limits = [_number(folder / "memory.max"), _number(folder / "memory.high")]
            used = _number(folder / "memory.current")
            files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            files -= stat.get("file_mapped", 0)
        else:
            limits = [_number(folder / "memory.limit_in_bytes")]
            used = _number(folder / "memory.usage_in_bytes")
            files = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
            files -= stat.get("total_mapped_file", 0)
        limits = [limit for limit in limits if limit is not None and limit < NO_LIMIT]
        if limits and used is not None:
            room = min(limits) - used + max(0, files)
            yield Room(max(0, room), f"limit of the memory group {folder}")


def _groups(root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's memory group and all its ancestors, innermost first."""
    mounts = _mounts(root)
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" else 1 if "memory" in controllers.split(",") else 0
        if version not in mounts:
            continue
        top, shown = mounts[version]
        folder = top / _below(path, shown)
        folder = folder if folder.is_dir() else top  # the host's path, seen from inside a container
        while True:
            yield version, folder
            if folder == top:
                break
            folder = folder.parent


def _below(path: str, shown: str) -> str:
    """The group's path under the mount point; a container's mount shows only the subtree
    `shown`."""
    if shown != "/" and (path == shown or path.startswith(shown + "/")):
        path = path[len(shown):]
    return "" if "/.." in path else path.strip("/")


def _mounts(root: Path) -> dict[int, tuple[Path, str]]:
    """version -> (mount point of its memory controller, the subtree the mount shows)."""
    mounts = {}
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        memory_v1 = kind[0] == "cgroup" and "memory" in kind[-1].split(",")
        if kind[0] == "cgroup2" or memory_v1:
            point = root / fields[4].replace("\\040", " ").lstrip("/")
            mounts[1 if memory_v1 else 2] = (point, fields[3])
    return mounts


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file in this group, or "max"
        return None


def _table(path: Path) -> dict[str, int]:
    """Lines "name: 12 kB" or "name 12" as {name: 12}; lines without a number are left out."""
    table = {}
    for line in _lines(path):
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            table[words[0]] = int(words[1])
    return table


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX; the last five fields are not used here."""

    _fields_ = [
        ("length", ctypes.c_ulong), ("load", ctypes.c_ulong), ("total", ctypes.c_ulonglong),
        ("available", ctypes.c_ulonglong), ("others", ctypes.c_ulonglong * 5),
    ]


def _windows_available() -> int:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return status.available
