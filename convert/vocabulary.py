"""Tokenizer files of a checkpoint to GGUF's tokenizer keys.

tokenizer.model (SentencePiece) and tokenizer.json (BPE over bytes, or SentencePiece's BPE with byte
fallback). Special ids, flags, merges and the chat template are read by gguf-py.
"""

from dataclasses import dataclass, field
from pathlib import Path

import gguf
from gguf import TokenType as Kind

from dali_gguf.convert.checkpoint import read_json
from dali_gguf.convert.gguf_output import V, Value, array, boolean, scalar, string
from dali_gguf.convert.model_keys import Config
from dali_gguf.convert.pre_tokenizer import recognize
from dali_gguf.convert.sentencepiece_file import read_pieces
from dali_gguf.errors import ConvertError

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(slots=True)
class Vocabulary:
    """Tokens by id, filled from the files; ids without a token are padding."""

    size: int
    tokens: list[str] = field(init=False)
    kinds: list[int] = field(init=False)
    scores: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = [f"[PAD{i}]" for i in range(self.size)]
        self.kinds = [int(Kind.UNUSED)] * self.size
        self.scores = [-10000.0] * self.size

    def set(self, id_: int, text: str, kind: int, score: float = 0.0) -> None:
        if id_ < self.size:  # beyond: no row in the embedding, so it can never be used
            self.tokens[id_], self.kinds[id_], self.scores[id_] = text, int(kind), score


def tokenizer_keys(folder: Path, config: Config, pre: str | None = None) -> dict[str, Value]:
    """All tokenizer keys. pre: the pre-tokenizer's name instead of recognizing it."""
    model = folder / "tokenizer.model"
    if config.architecture.spm and model.is_file():
        pieces = read_pieces(model)
        if pieces:
            return _spm_keys(folder, config, pieces)
    if not (folder / "tokenizer.json").is_file():
        raise ConvertError(
            f"{folder}: no "
            f"tokenizer.json{' or tokenizer.model' if config.architecture.spm else ''}; "
            "fetch the tokenizer's files of the model"
        )
    tokenizer = read_json(folder / "tokenizer.json", "a tokenizer")
    kind = (tokenizer.get("model") or {}).get("type")
    if kind != "BPE":
        raise ConvertError(f"{folder / 'tokenizer.json'}: a {kind} tokenizer; expected BPE")
    if tokenizer["model"].get("byte_fallback"):
        return _fallback_keys(folder, config, tokenizer)
    return _bpe_keys(folder, config, tokenizer, pre)


def _vocabulary_size(folder: Path, config: Config, highest: int) -> int:
    size = config.get("vocab_size", default=highest + 1)
    if highest >= size:
        raise ConvertError(
            f"{folder}: the tokenizer has a token {highest}, config.json says vocab_size {size}; "
            "the tokenizer belongs to another model"
        )
    return size


def looks_special(token: str) -> bool:
    """Added tokens that are control tokens although their file does not mark them special."""
    if token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    ends = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return any(token.startswith(a) and token.endswith(b) for a, b in ends)


def _added_kind(content: str, special: bool) -> tuple[str, Kind]:
    if special or looks_special(content):
        return content, Kind.CONTROL
    return content.replace("\u2581", " "), Kind.USER_DEFINED


def _named_tokens(folder: Path) -> set[str]:
    path = folder / "tokenizer_config.json"
    settings = read_json(path, "settings") if path.is_file() else {}
    found = (settings.get(name) for name in NAMED)
    return {t["content"] if isinstance(t, dict) else t for t in found if t}


def _bpe_keys(folder: Path, config: Config, tokenizer: dict, pre: str | None) -> dict[str, Value]:
    vocab, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or []
    highest = max([*vocab.values(), *(t["id"] for t in added)])
    words = Vocabulary(_vocabulary_size(folder, config, highest))
    named = _named_tokens(folder)
    for text, id_ in vocab.items():
        words.set(id_, text, Kind.CONTROL if text in named else Kind.NORMAL)
    for token in added:
        words.set(
            token["id"],
            *_added_kind(
                token["content"], token.get("special", False) or token["content"] in named
            ),
        )
    keys = {
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string(pre or recognize(folder / "tokenizer.json", tokenizer)),
        "tokenizer.ggml.tokens": array(V.STRING, words.tokens),
        "tokenizer.ggml.token_type": array(V.INT32, words.kinds),
    }
    special = special_keys(gguf.SpecialVocab(folder, load_merges=True))
    if "tokenizer.ggml.merges" not in special:
        raise ConvertError(f"{folder / 'tokenizer.json'}: no merges; the file is not complete")
    return _with_settings(folder, config, keys | special)


def _spm_keys(
    folder: Path, config: Config, pieces: list[tuple[str, float, int]]
) -> dict[str, Value]:
    words = Vocabulary(config.get("vocab_size", default=len(pieces)))
    for id_, (text, score, kind) in enumerate(pieces):  # user-defined pieces count as ordinary ones
        words.set(id_, text, Kind.NORMAL if kind == Kind.USER_DEFINED else kind, score)
    path = folder / "added_tokens.json"
    for content, id_ in (read_json(path, "tokens") if path.is_file() else {}).items():
        words.set(id_, content, Kind.USER_DEFINED, -1000.0)
    path = folder / "tokenizer_config.json"
    decoder = (read_json(path, "settings") if path.is_file() else {}).get(
        "added_tokens_decoder"
    ) or {}
    for id_, token in decoder.items():
        words.set(int(id_), *_added_kind(token["content"], token.get("special", False)), -1000.0)
    return _llama_keys(folder, config, words)


def _fallback_keys(folder: Path, config: Config, tokenizer: dict) -> dict[str, Value]:
    """SentencePiece's BPE kept as a tokenizer.json: a token's score is minus its merge's rank."""
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    vocab = model["vocab"]
    words = Vocabulary(
        _vocabulary_size(folder, config, max([*vocab.values(), *(t["id"] for t in added)]))
    )
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(model["merges"]):
        ranks.setdefault(
            "".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1), rank
        )
    for text, id_ in vocab.items():
        if text == model.get("unk_token"):
            kind = Kind.UNKNOWN
        else:
            kind = (
                Kind.BYTE
                if len(text) == 6 and text.startswith("<0x") and text.endswith(">")
                else Kind.NORMAL
            )
        unmerged = 0.0 if kind != Kind.NORMAL else -float(len(ranks))
        words.set(id_, text, kind, -float(ranks[text]) if text in ranks else unmerged)
    for token in added:
        if token["content"] != model.get("unk_token"):
            words.set(
                token["id"], *_added_kind(token["content"], token.get("special", False)), -1000.0
            )
    return _llama_keys(folder, config, words)


def _llama_keys(folder: Path, config: Config, words: Vocabulary) -> dict[str, Value]:
    keys = {
        "tokenizer.ggml.model": string("llama"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": array(V.STRING, words.tokens),
        "tokenizer.ggml.scores": array(V.FLOAT32, words.scores),
        "tokenizer.ggml.token_type": array(V.INT32, words.kinds),
    }
    return _with_settings(
        folder, config, keys | special_keys(gguf.SpecialVocab(folder, n_vocab=words.size))
    )


def _with_settings(folder: Path, config: Config, keys: dict[str, Value]) -> dict[str, Value]:
    """Two settings that llama.cpp keeps for the llama architecture only."""
    if config.architecture.name != "llama":
        return keys
    path = folder / "tokenizer_config.json"
    prefix = (read_json(path, "settings") if path.is_file() else {}).get("add_prefix_space")
    if prefix is not None:
        keys["tokenizer.ggml.add_space_prefix"] = boolean(bool(prefix))
    if config.get("vocab_size") == 49152:
        keys["tokenizer.ggml.add_bos_token"] = boolean(False)
    return keys


def special_keys(special: gguf.SpecialVocab) -> dict[str, Value]:
    """Special ids, add_..._token flags, merges and the chat template that gguf-py found."""
    writer = gguf.GGUFWriter(None, "")
    special.add_to_gguf(writer, quiet=True)
    return written_keys(writer)


def written_keys(writer: gguf.GGUFWriter) -> dict[str, Value]:
    """The keys that were added to a gguf-py writer, but the architecture."""
    keys = {}
    for key, entry in writer.kv_data[0].items():
        if key == "general.architecture":
            continue
        if entry.type == V.STRING:
            keys[key] = string(entry.value)
        elif entry.type == V.ARRAY:
            text = all(isinstance(v, (str, bytes)) for v in entry.value)
            keys[key] = array(V.STRING if text else entry.sub_type or V.INT32, entry.value)
        else:
            keys[key] = scalar(entry.type, entry.value)
    return keys
