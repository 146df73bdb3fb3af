"""The whole way on one screen: open, prefill, decode, text."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dali_gguf import models
from dali_gguf.closing import close_all
from dali_gguf.device import Device, Step, check_threads
from dali_gguf.errors import InputError, NumericError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.layers import Pass
from dali_gguf.offload import devices, disk_tier
from dali_gguf.offload.arena_stats import Since
from dali_gguf.offload.devices import GpuOptions
from dali_gguf.offload.scheduler import Scheduler
from dali_gguf.offload.vram import out_of_memory
from dali_gguf.sampler import Sampler, SamplingParams
from dali_gguf.stats import Stats, hash_logits
from dali_gguf.stopping import StopFilter
from dali_gguf.tokenizer import StreamDecoder, Tokenizer

DEFAULT_CONTEXT = 4096
KV_TYPES = ("f16", "q8_0", "f32")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What Engine takes besides the model. Raises InputError for an impossible value."""

    n_ctx: int = DEFAULT_CONTEXT
    threads: int | None = None
    device: str | Device = "cpu"
    n_batch: int = 512
    n_seq: int = 1
    kv_type: str = "f16"
    mmap: bool = True
    ram: int | str | None = None
    gpu: GpuOptions = GpuOptions()

    def __post_init__(self):
        counts = {"n_batch": self.n_batch, "n_seq": self.n_seq, "threads": self.threads or 1}
        for name, value in counts.items():
            if type(value) is not int or value < 1:
                raise InputError(f"{name} is {value!r}; expected a whole number of at least 1")
        check_threads(self.threads or 1)
        if type(self.n_ctx) is not int or self.n_ctx < 0:
            raise InputError(
                f"n_ctx is {self.n_ctx!r}; expected a whole number (0: the model's own context)"
            )
        if self.kv_type not in KV_TYPES:
            known = ", ".join(KV_TYPES)
            raise InputError(f"KV cache type {self.kv_type!r} is not known; expected {known}")


class Engine:
    """A loaded model. Context manager; not for several threads at once.

    config, n_ctx, n_vocab, tokenizer; stats: figures of the last generate.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        n_ctx: int = DEFAULT_CONTEXT,
        threads: int | None = None,
        device: str | Device = "cpu",
        n_batch: int = 512,
        n_seq: int = 1,
        kv_type: str = "f16",
        mmap: bool = True,
        ram: int | str | None = None,
        vram: int | str | None = None,
        placement: str | None = None,
        prefetch: str = "residual",
        expert_cache: str = "decayed",
        verify: bool = False,
    ):
        """path None: the model that comes with the package. n_ctx 0: as trained, never more.

        n_batch: tokens of a prefill step. n_seq: sequences that can be decoded together. ram: main
        memory to use, in bytes or like "6G"; None: what there is. A model that does not fit streams
        its experts from disk. device: cpu, cuda, cuda:1, auto, or cpu-torch (torch on the CPU, as
        if it were a GPU); vram: GPU memory to use; placement, prefetch, expert_cache: DALI's
        policies (placement None: threshold, or a static one where that is faster); verify: every
        expert again on the CPU.
        Raises ModelFileError, UnsupportedError, InputError, MemoryBudgetError.
        """
        gpu = GpuOptions(vram, placement, prefetch, expert_cache, verify)
        self.options = EngineOptions(
            n_ctx, threads, device, n_batch, n_seq, kv_type, mmap, ram, gpu
        )
        self.path = Path(path) if path is not None else default_model()
        self.stats = Stats()
        self.file = GGUFFile.open(self.path)
        with ExitStack() as undo:  # what is open already is closed again if a later step fails
            undo.callback(self.file.close)
            self.config = models.read_config(self.file)
            self.n_ctx = context_size(n_ctx, self.config.n_ctx_train)
            load = devices.Load(self.n_ctx, n_seq, n_batch, kv_type)
            tensors = self.file.tensors
            self._tier = devices.plan_gpu(device, threads, gpu, tensors, self.config, load)
            self.memory = devices.plan_memory(self._tier, ram, self.file, self.config, load)
            placed = disk_tier.Placement(self.memory, self.file, mmap)
            undo.callback(placed.close)
            self.file = placed.file
            self.guard = disk_tier.guard(self.memory, self.file, mmap)
            undo.callback(self.guard.close)
            self.device = devices.open_device(device, threads, self._tier)
            undo.callback(self._close_device)
            placed.wait()
            self.model = models.load_model(self.file, self.config, self.device)
            self.scheduler = self._make_scheduler()
            undo.callback(self.scheduler.close)
            self.cache = self.model.new_cache(n_seq, self.n_ctx, kv_type)
            undo.pop_all()

    def _make_scheduler(self) -> Scheduler:
        """Who computes the experts: the GPU tier, or the CPU from memory or from disk."""
        if self._tier is not None:
            return self._tier.make_scheduler(
                self.model, self.config, self.file, memory=self.memory
            )
        return disk_tier.make_scheduler(
            self.memory, self.device, self.model.experts, self.model.routers, self.config,
            self.file, self.options.gpu.prefetch != "none", self.options.ram,
        )

    @property
    def n_vocab(self) -> int:
        return self.model.n_vocab

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_metadata(self.file.metadata, str(self.path))

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32 [T, n_vocab]: the logits after each of ids, from an empty context."""
        ids = self._checked(ids, self.n_ctx)
        return np.concatenate([self._prefill(ids, s, slice(None)) for s in self._starts(ids)])

    def generate(
        self, prompt: str | list[int], params: SamplingParams = SamplingParams()
    ) -> Iterator[str]:
        """Pieces of the answer as they are made, each of whole characters.

        Raises InputError at once if the prompt is empty or leaves no room in the context.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return self._generate(self._checked(ids, self.n_ctx - 1), params)

    def _generate(self, ids: np.ndarray, params: SamplingParams) -> Iterator[str]:
        text, stop = StreamDecoder(self.tokenizer), StopFilter(params.stop)
        for token in self._tokens(ids, params):
            piece = stop.push(text.push(token))
            if piece:
                yield piece
            if stop.stopped:
                self.stats = self.stats.finished("stop")
                return
        rest = stop.push(text.finish()) + stop.finish()
        if rest:
            yield rest

    def tokens(
        self, prompt: list[int] | np.ndarray, params: SamplingParams = SamplingParams()
    ) -> Iterator[int]:
        """Ids of the answer, without the token that ended it. Updates stats as it goes.

        Raises InputError at once, as generate does.
        """
        return self._tokens(self._checked(prompt, self.n_ctx - 1), params)

    def _tokens(self, ids: np.ndarray, params: SamplingParams) -> Iterator[int]:
        sampler = Sampler(params, ids.tolist())
        room = self.n_ctx - len(ids)
        wanted = room if params.max_tokens < 0 else min(params.max_tokens, room)
        ends = frozenset() if params.never_ends else self.tokenizer.end_ids
        self.stats = Stats(bytes_per_token=self.model.bytes_per_token, finish="interrupted")
        started = time.perf_counter()
        for start in self._starts(ids):
            last = start + self.options.n_batch >= len(ids)
            logits = self._prefill(ids, start, slice(-1, None) if last else None)
        self.stats = self.stats.prefilled(len(ids), time.perf_counter() - started)
        disk = Since(self.scheduler)
        for position in range(len(ids), len(ids) + wanted):
            started = time.perf_counter()
            self.stats = self.stats.hashed(hash_logits(logits[0], self.stats.logits_hash))
            token = sampler.sample(logits[0])
            if token in ends:
                self.stats = self.stats.finished("eos")
                return
            last = position + 1 == len(ids) + wanted
            logits = logits if last else self.forward([token], [position])
            self.stats = self.stats.decoded(0 if last else 1, time.perf_counter() - started)
            self.stats = self.stats.with_disk(disk.now(self.scheduler))
            yield token
        self.stats = self.stats.finished("length" if wanted == params.max_tokens else "context")

    def _starts(self, ids: np.ndarray) -> range:
        return range(0, len(ids), self.options.n_batch)

    def _prefill(self, ids: np.ndarray, start: int, rows: slice | None) -> np.ndarray | None:
        """One step of n_batch tokens of sequence 0, from position start."""
        part = ids[start : start + self.options.n_batch]
        return self.forward(part, np.arange(start, start + len(part)), rows=rows)

    def forward(
        self, ids, positions, sequences=None, rows: slice | None = slice(None)
    ) -> np.ndarray | None:
        """One step. ids, positions, sequences: [T] as in device.Step (sequences None: all 0).

        Returns float32 logits [R, n_vocab] of the tokens in rows; rows None: fills the cache only.
        Raises NumericError, naming the layer, if a logit is NaN or infinite.
        """
        ids = np.asarray(ids, np.int32)
        sequences = np.zeros(len(ids)) if sequences is None else sequences
        step = Step(ids, np.asarray(positions, np.int32), np.asarray(sequences, np.int32))
        run = Pass(step, self.cache, self.scheduler)
        try:
            logits = self.model.forward(run, rows)
        except RuntimeError as error:
            if self._tier is None or not out_of_memory(error):
                raise
            self.scheduler = self._tier.smaller(self.scheduler)
            return self.forward(ids, positions, sequences, rows)
        if self._tier is not None:
            self.scheduler = self._tier.reviewed(self.scheduler)
        self.guard.check()
        if logits is None:
            return None
        logits = self.device.to_host(logits)
        if not np.isfinite(logits).all():
            raise self._numeric_error(run)
        return logits

    def _numeric_error(self, run: Pass) -> NumericError:
        layer = self.model.first_bad_layer(run)
        where = "the output layer" if layer is None else f"layer {layer} of {self.config.n_layer}"
        return NumericError(
            f"{self.path}: {where} gives NaN or infinity; "
            "the file is probably damaged, fetch it again"
        )

    def _checked(self, ids, room: int) -> np.ndarray:
        """int32 [T], if they are tokens and fit. Raises InputError."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or len(ids) == 0:
            raise InputError("the prompt is empty; expected at least one token")
        if len(ids) > room:
            raise InputError(
                f"the prompt has {len(ids)} tokens, the context room for {room}; raise it with -c"
            )
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.n_vocab:
            raise InputError(f"token ids have to be whole numbers from 0 to {self.n_vocab - 1}")
        return ids.astype(np.int32)

    def close(self) -> None:
        """Everything, whatever fails on the way; then raises the first error. A device that was
        handed in stays open: it belongs to the caller."""
        close_all(self.scheduler.close, self._close_device, self.guard.close, self.file.close)

    def _close_device(self) -> None:
        if isinstance(self.options.device, str):
            self.device.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def default_model() -> Path:
    """The model that comes with the package."""
    found = sorted(Path(models.__file__).parent.glob("tiny-moe-*.gguf"))
    if not found:
        raise InputError("no model given, and none came with this installation; give -m MODEL.gguf")
    return found[0]


def context_size(wanted: int, trained: int) -> int:
    """wanted, but not more than the model was trained for; a word if more was asked for."""
    if wanted > max(trained, DEFAULT_CONTEXT):
        line = f"context {wanted} is more than the model's {trained}; using {trained}"
        print(f"dali-gguf: {line}", file=sys.stderr)
    return min(wanted, trained) or trained
