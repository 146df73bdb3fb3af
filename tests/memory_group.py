"""A Linux memory group with a limit, for tests and benchmarks. Needs root."""

import os
import subprocess
from pathlib import Path

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Context manager: a fresh group; processes started with run() live in it."""

    def __init__(self, name: str, limit: int):
        self.version = 1 if (V1 / "memory.limit_in_bytes").exists() else 2
        self.folder = (V1 if self.version == 1 else V2) / f"dali-{name}-{os.getpid()}"
        self.limit = limit

    @staticmethod
    def usable() -> bool:
        folder = V1 if (V1 / "memory.limit_in_bytes").exists() else V2
        if not hasattr(os, "geteuid") or os.geteuid() != 0 or not folder.is_dir():
            return False
        try:
            (folder / f"dali-probe-{os.getpid()}").mkdir()
            (folder / f"dali-probe-{os.getpid()}").rmdir()
        except OSError:
            return False
        return True

    def __enter__(self) -> "MemoryGroup":
        self.folder.mkdir()
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(str(self.limit))
        return self

    def run(self, command: list[str], **options) -> subprocess.CompletedProcess:
        procs = str(self.folder / "cgroup.procs")

        def join():
            with open(procs, "w") as file:
                file.write(str(os.getpid()))

        return subprocess.run(command, preexec_fn=join, **options)

    @property
    def peak(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.folder / name).read_text())

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for going over the limit."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.folder / name).read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def __exit__(self, *_) -> None:
        self.folder.rmdir()
