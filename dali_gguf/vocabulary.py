"""The tokenizer keys of a GGUF file, checked."""

from dataclasses import dataclass

import numpy as np
from gguf import TokenType

from dali_gguf.errors import ModelFileError, UnsupportedError

MODELS = ("gpt2", "llama")
SPM_SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """tokens, kinds int32 [n_vocab] (gguf.TokenType), scores float32 [n_vocab], merges "a b".

    special_ids and flags hold the keys of these names that the file has, checked.
    """

    model: str
    pre_tokenizer: str
    tokens: list[str]
    kinds: np.ndarray
    scores: np.ndarray
    merges: list[str]
    special_ids: dict[str, int]
    flags: dict[str, bool]
    chat_template: str | None
    path: str

    @classmethod
    def from_metadata(cls, metadata: dict, path: str = "") -> "Vocabulary":
        """Raises ModelFileError for a key of the wrong type or length, UnsupportedError."""
        keys = Keys(metadata, path)
        model = keys.get("model", str, "")
        if model not in MODELS:
            found = (
                f"tokenizer model {model!r}" if model else "no tokenizer (no tokenizer.ggml.model)"
            )
            raise UnsupportedError(f"{keys.name}{found}; this version knows {' and '.join(MODELS)}")
        tokens = keys.get("tokens", list, None)
        if not tokens:
            raise keys.error("tokens", "missing or empty", "a list of strings")
        tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(tokens)]
        return cls(
            model,
            keys.get("pre", str, ""),
            tokens,
            keys.numbers("token_type", len(tokens), np.int32, TokenType.NORMAL, model == "llama"),
            keys.numbers("scores", len(tokens), np.float32, 0, model == "llama"),
            keys.get("merges", list, [], required=model == "gpt2"),
            keys.special_ids(len(tokens), SPM_SPECIAL_IDS if model == "llama" else {}),
            keys.flags(),
            keys.chat_template(),
            path,
        )

    def special_id(self, key: str) -> int | None:
        return self.special_ids.get(key)

    def flag(self, key: str, default: bool) -> bool:
        return self.flags.get(key, default)

    def of_kinds(self, kinds: tuple[TokenType, ...]) -> list[int]:
        return np.flatnonzero(np.isin(self.kinds, kinds)).tolist()


@dataclass(frozen=True, slots=True)
class Keys:
    """Typed access to the keys under tokenizer.ggml."""

    metadata: dict
    path: str

    @property
    def name(self) -> str:
        return f"{self.path}: " if self.path else ""

    def error(self, key: str, found: str, expected: str) -> ModelFileError:
        return ModelFileError(f"{self.name}tokenizer.ggml.{key} is {found}; expected {expected}")

    def get(self, key: str, kind: type, default, required: bool = False):
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if required and f"tokenizer.ggml.{key}" not in self.metadata:
            raise self.error(key, "missing", f"a {kind.__name__}")
        if value is not default and type(value) is not kind:
            raise self.error(key, f"a {type(value).__name__}", f"a {kind.__name__}")
        return value

    def numbers(self, key: str, size: int, dtype: type, default: int, required: bool) -> np.ndarray:
        """An array with at least one number a token, or size times the default."""
        value = self.get(key, np.ndarray, None, required)
        if value is None:
            return np.full(size, default, dtype)
        if len(value) < size:
            raise self.error(key, f"{len(value)} numbers", f"{size}, one a token")
        if value.dtype.kind not in "iuf" or not np.all(np.isfinite(value)):
            raise self.error(key, f"an array of {value.dtype} with odd values", "finite numbers")
        return value[:size].astype(dtype)

    def special_ids(self, size: int, defaults: dict[str, int]) -> dict[str, int]:
        """All `..._token_id` keys; one outside the vocabulary is an error."""
        ids = {key: id for key, id in defaults.items() if id < size}
        for key in self._named("_token_id"):
            id = self.get(key, int, None)
            if not 0 <= id < size:
                raise self.error(key, str(id), f"a token of the vocabulary, 0 to {size - 1}")
            ids[key] = id
        return ids

    def flags(self) -> dict[str, bool]:
        keys = [*self._named("_token"), *self._named("_space_prefix")]
        return {key: self.get(key, bool, None) for key in keys if key.startswith("add_")}

    def chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        if template is not None and type(template) is not str:
            found = type(template).__name__
            raise ModelFileError(
                f"{self.name}tokenizer.chat_template is a {found}; expected a string"
            )
        return template

    def _named(self, end: str) -> list[str]:
        start = "tokenizer.ggml."
        return [k[len(start) :] for k in self.metadata if k.startswith(start) and k.endswith(end)]
