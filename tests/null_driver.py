"""A CUDA driver that only takes notes, so that kernels are launched where there is no card.

Triton's own launcher and the project's call a library with the names of libcuda, compiled here by
gcc. What it is asked to launch is in `Notes`; nothing runs, unless the test has it computed.
"""

import ctypes
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

HEADER = Path(sysconfig.get_path("include")) / "Python.h"  # for Triton's launcher
CAN_COMPILE = shutil.which("gcc") is not None and HEADER.exists()
TARGET = GPUTarget("cuda", 86, 32)
STREAM = 7
MOST, PARAMETERS = 64, 16  # launches that are noted, and parameters of one; Triton adds some
LIBRARY = """
#include <stddef.h>
#include <string.h>
#include "cuda.h"
#define CALL(...) { __VA_ARGS__; return failing; }
typedef struct { long long function, stream, grid[3], block[3], shared, values[%d]; } Launch;
int launches, noting, functions, failing, parameters[%d];
void (*runs)(Launch *);
Launch noted[%d];
static CUresult note(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                     unsigned bz, unsigned shared, CUstream s, void **p) {
    if (!noting) return failing;
    Launch now = {(long long)f, (long long)s, {gx, gy, gz}, {bx, by, bz}, shared, {0}};
    for (int i = 0; i < parameters[(size_t)f]; i++) memcpy(&now.values[i], p[i], 8);
    noted[launches++ %% %d] = now;
    if (runs) runs(&now);
    return failing;
}
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
        unsigned by, unsigned bz, unsigned shared, CUstream s, void **p, void **extra) {
    return note(f, gx, gy, gz, bx, by, bz, shared, s, p);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
    return note(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                c->sharedMemBytes, c->hStream, p);
}
CUresult cuEventRecord(CUevent e, CUstream s) {
    Launch now = {-(long long)e, (long long)s};
    if (noting) noted[launches++ %% %d] = now;
    return failing;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t n, CUstream s)
    CALL(memcpy((void *)to, from, n))
CUresult cuGetErrorString(CUresult e, const char **s) CALL(*s = "error")
CUresult cuDriverGetVersion(int *v) CALL(*v = 12080)
CUresult cuDeviceGet(CUdevice *d, int i) CALL(*d = 0)
CUresult cuDeviceGetAttribute(int *p, CUdevice_attribute a, CUdevice d) CALL(*p = 99 << 10)
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) CALL(*c = (CUcontext)1)
CUresult cuCtxGetCurrent(CUcontext *c) CALL(*c = (CUcontext)1)
CUresult cuCtxSetCurrent(CUcontext c) CALL()
CUresult cuCtxGetLimit(size_t *n, CUlimit l) CALL(*n = 0)
CUresult cuCtxSetLimit(CUlimit l, size_t n) CALL()
CUresult cuModuleLoadData(CUmodule *m, const void *image) CALL(*m = (CUmodule)2)
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
    CALL(*f = (CUfunction)(size_t)++functions;
         parameters[functions] = strstr(name, "vector") ? 14 : strstr(name, "dot") ? 15 :
             strstr(name, "rope") ? 7 : strstr(name, "norm") ? 4 : 8)
CUresult cuFuncGetAttribute(int *p, CUfunction_attribute a, CUfunction f)
    CALL(*p = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) CALL()
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) CALL()
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p)
    CALL(*(CUdeviceptr *)out = p)
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) CALL(*n = 1)
""" % (PARAMETERS, MOST, MOST, MOST, MOST)


class Noted(ctypes.Structure):
    """One launch. values: of its parameters; the upper half of a 32-bit one's is anything. An event
    that is recorded has the negative of its handle as function."""

    _fields_ = [
        ("function", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("grid", ctypes.c_int64 * 3),
        ("block", ctypes.c_int64 * 3),
        ("shared", ctypes.c_int64),
        ("values", ctypes.c_int64 * PARAMETERS),
    ]


class NullDriver:
    """For Triton: a card that was not asked for anything."""

    def __init__(self):
        self.utils, self.sources = nvidia.CudaUtils(), []  # of the functions, in their order

    def launcher_cls(self, source, metadata):
        self.sources.append(source)
        return nvidia.CudaLauncher(source, metadata)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return TARGET


class Notes:
    """Makes the library in folder, and every launch of this process go to it."""

    def __init__(self, folder: Path, noting: bool = True):
        source, library = folder / "cuda.c", folder / "libcuda.so.1"
        source.write_text(LIBRARY)
        include = Path(nvidia.__file__).parent / "include"
        options = ("-shared", "-fPIC", "-O2", f"-I{include}", "-Wl,-soname,libcuda.so.1")
        subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
        (folder / "libcuda.so").symlink_to(library)  # older Tritons link by this name
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        self.set("noting", noting)
        nvidia.libcuda_dirs = lambda: [str(folder)]
        self._driver = NullDriver()
        driver.set_active(self._driver)

    def set(self, name: str, value: int) -> None:
        """noting: whether launches are noted. failing: what every function returns."""
        ctypes.c_int.in_dll(self._library, name).value = value

    def take(self) -> list[Noted]:
        """The launches since the last call."""
        n = ctypes.c_int.in_dll(self._library, "launches").value
        noted = (Noted * MOST).in_dll(self._library, "noted")
        self.set("launches", 0)
        return [Noted.from_buffer_copy(noted[i]) for i in range(n)]

    def compute(self, run: Callable[[str, dict], None]) -> None:
        """From now on run(kernel's name, its arguments by name) is what a launch does. Addresses
        are numbers; "grid" is among the arguments."""

        def runs(launch) -> None:
            launch = launch.contents
            source = self._driver.sources[launch.function - 1]
            names = [name for name, kind in source.signature.items() if kind != "constexpr"]
            values = dict(zip(names, launch.values), grid=tuple(launch.grid))
            for name in names:
                if source.signature[name] == "i32":
                    values[name] &= 0xFFFFFFFF
            for place, value in source.constants.items():
                values[source.fn.arg_names[place[0]]] = value
            run(source.fn.__name__, values)

        self._runs = ctypes.CFUNCTYPE(None, ctypes.POINTER(Noted))(runs)  # kept: C calls it
        address = ctypes.cast(self._runs, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(self._library, "runs").value = address
