"""hf:owner/repo[:quant] -> GGUF files in the Hugging Face cache.

huggingface-hub does the work: its progress bar, resuming, cache, HF_TOKEN, HF_HUB_OFFLINE.
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from dali_gguf.errors import InputError

PREFIX = "hf:"
TIMEOUT = 20  # seconds to wait for the hub's answer
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
QUANT = re.compile(r"(?<![a-z0-9])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?![a-z0-9])", re.I)
PREFERRED = (
    "Q4_K_M Q4_K_S Q4_K_XL MXFP4 MXFP4_MOE Q4_0 IQ4_XS IQ4_NL Q4_1 Q5_K_M Q5_K_S Q6_K Q8_0 Q3_K_M "
    "BF16 F16 F32"
).split()
NO_MODEL = re.compile(r"mmproj|imatrix", re.I)


@dataclass(frozen=True, slots=True)
class Choice:
    """One model of a repository: its name without shard number and .gguf, and its files."""

    name: str
    files: tuple[str, ...]

    @property
    def quant(self) -> str:
        found = QUANT.findall(self.name.rsplit("/", 1)[-1])
        return found[-1].upper() if found else ""


@dataclass(frozen=True, slots=True)
class Repository:
    """owner/repo, the quant asked for ("" for any), and where to look for it."""

    id: str
    quant: str
    endpoint: str | None = None
    cache: Path | None = None

    @property
    def model(self) -> str:
        return f"{PREFIX}{self.id}"


def is_hub_name(model: str) -> bool:
    return model.startswith(PREFIX)


def fetch(model: str, cache: Path | None = None) -> Path:
    """Path of the (first) file of `hf:owner/repo[:quant]`, downloaded unless it is in the cache.

    Raises InputError: a malformed name, no such repository or quant, no GGUF in it, no connection.
    """
    repository = parse(model, cache)
    try:
        return download(repository)
    except InputError:
        raise
    except Exception as error:  # two HTTP libraries, by version, each with errors of its own
        return cached(repository, error)


def parse(model: str, cache: Path | None) -> Repository:
    match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?::([\w.-]+))?", model)
    if not match:
        raise InputError(
            f"{model!r}: expected hf:owner/repo or hf:owner/repo:quant, "
            "as in hf:Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"
        )
    return Repository(match[1], match[2] or "", os.environ.get("HF_ENDPOINT") or None, cache)


def download(repository: Repository) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        # not list_repo_files: without a connection it tries again for half a minute
        info = HfApi(endpoint=repository.endpoint).model_info(repository.id, timeout=TIMEOUT)
        choice = choose(repository, [file.rfilename for file in info.siblings or ()])
        paths = [
            hf_hub_download(
                repository.id, name, cache_dir=repository.cache, endpoint=repository.endpoint
            )
            for name in choice.files
        ]
    except GatedRepoError:
        raise InputError(
            f"{repository.model}: accept its terms on the model's page first, then set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{repository.model}: no such repository; check the name, or set HF_TOKEN"
        ) from None
    return Path(paths[0])


def cached(repository: Repository, error: Exception) -> Path:
    """The same file from the cache when the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    reason = " ".join(str(error).split())[:160] or type(error).__name__
    try:
        folder = Path(
            snapshot_download(repository.id, cache_dir=repository.cache, local_files_only=True)
        )
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
        choice = choose(repository, files)
    except Exception:  # not in the cache, or not this quant
        raise InputError(
            f"{repository.model}: cannot be downloaded and is not in the cache: {reason}"
        ) from None
    print(
        f"dali-gguf: {repository.model} cannot be asked for; using the cached {choice.files[0]}",
        file=sys.stderr,
    )
    return folder / choice.files[0]


def choose(repository: Repository, files: list[str]) -> Choice:
    """The model of the quant asked for, else the most usual quant there is."""
    choices = grouped(files)
    if not choices:
        raise no_gguf(repository, files)
    wanted = [repository.quant.upper()] if repository.quant else PREFERRED
    for quant in wanted:
        if found := [choice for choice in choices if matches(choice, quant)]:
            return min(found, key=lambda choice: (len(choice.name), choice.name))
    if repository.quant or len(choices) > 1:
        names = ", ".join(sorted({choice.quant or choice.name for choice in choices}))
        asked = f"no {repository.quant} in it" if repository.quant else "which quant?"
        raise InputError(
            f"{repository.model}: {asked}; there are {names}; ask as in {repository.model}:QUANT"
        )
    return choices[0]


def matches(choice: Choice, quant: str) -> bool:
    return quant in (choice.quant, choice.quant.removeprefix("UD-"))


def grouped(files: list[str]) -> list[Choice]:
    """The models among the files of a repository; the shards of a split one go together."""
    groups: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.lower().endswith(".gguf") and not NO_MODEL.search(file):
            groups.setdefault(SHARD.sub("", file[: -len(".gguf")]), []).append(file)
    return [Choice(name, tuple(names)) for name, names in groups.items()]


def no_gguf(repository: Repository, files: list[str]) -> InputError:
    if any(file.endswith(".safetensors") for file in files):
        return InputError(
            f"{repository.model}: no GGUF file in it, but safetensors; "
            f"make one with: dali-gguf convert {repository.id}"
        )
    return InputError(
        f"{repository.model}: no GGUF file in it; look for a repository that ends in -GGUF"
    )
