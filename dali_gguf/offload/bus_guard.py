"""A mapped file that is cut while in use: an error that names it, instead of death by SIGBUS.

Linux. The handler puts zero pages where the file ended and notes the address; the step that ran
into it ends, with wrong numbers that nobody sees: check() then raises.
"""

import ctypes
import mmap
import os
import signal
import sys

from dali_gguf.errors import ModelFileError
from dali_gguf.tensor import Tensor

SIGINFO = 4  # SA_SIGINFO
FIXED = 0x10  # MAP_FIXED
ADDRESS_AT = 16  # of si_addr in siginfo_t
HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of 64-bit Linux."""

    _fields_ = [
        ("handler", ctypes.c_void_p), ("mask", ctypes.c_ubyte * 128), ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class BusGuard:
    """Watches the mapped bytes of tensors. Several may be open; the last to close restores all."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        self._hit = 0  # address of the first fault, 0: none
        self._ranges: dict[str, tuple[int, int]] = {}
        for t in tensors.values():
            start, end = self._ranges.get(t.file, (t.address, t.address))
            self._ranges[t.file] = min(start, t.address), max(end, t.address + t.nbytes)
        if sys.platform == "linux":
            _open.append(self)
            if len(_open) == 1:
                _install()

    def catch(self, address: int) -> bool:
        """In the signal handler: True if the address is ours; its page and all after it are zero
        now."""
        page = address & -mmap.PAGESIZE
        for start, end in self._ranges.values():
            if start <= address < end:
                self._hit = self._hit or address
                where = ctypes.c_void_p(page)
                flags = FIXED | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                return _libc.mmap(where, end - page, mmap.PROT_READ, flags, -1, 0) == page
        return False

    def check(self) -> None:
        """Raises ModelFileError if the file turned out to be cut."""
        if not self._hit:
            return
        for t in self._tensors.values():
            if t.address <= self._hit < t.address + t.nbytes:
                size = os.stat(t.file).st_size
                raise ModelFileError(
                    f"{t.file}: tensor {t.name} at offset {t.offset} needs {t.nbytes} bytes, but "
                    f"the file ends at {size}: it was cut while in use; fetch it again"
                )
        raise ModelFileError("the model file was cut while in use; fetch it again")

    def close(self) -> None:
        if self in _open:
            _open.remove(self)
            if not _open:
                _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)


def _on_fault(number: int, info: int, context: int) -> None:
    address = ctypes.c_uint64.from_address(info + ADDRESS_AT).value
    if not any(guard.catch(address) for guard in _open):
        _libc.sigaction(signal.SIGBUS, ctypes.byref(_before), None)  # not ours: it happens again


def _install() -> None:
    action = _Action(handler=ctypes.cast(_callback, ctypes.c_void_p).value, flags=SIGINFO)
    _libc.sigaction(signal.SIGBUS, ctypes.byref(action), ctypes.byref(_before))


_open: list[BusGuard] = []
_before = _Action()
_callback = HANDLER(_on_fault)
_libc = ctypes.CDLL(None)
if sys.platform == "linux":
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
