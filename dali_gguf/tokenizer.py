"""Text to token ids and back, from the vocabulary in a GGUF file. The rules are llama.cpp's."""

import codecs
import re
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from gguf import TokenType

from dali_gguf import tokenizer_bpe, tokenizer_spm
from dali_gguf.errors import InputError
from dali_gguf.gguf_file import GGUFFile
from dali_gguf.tokenizer_patterns import PRE_TOKENIZERS, PreTokenizer
from dali_gguf.vocabulary import Vocabulary

# Tokens that end an answer whatever eos_token_id says, known by their text.
END_TEXTS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[ "
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> "
    "<reponame> <|file_sep|>".split()
)
END_KEYS = tuple(f"{name}_token_id" for name in "eos eot eom fim_pad fim_rep fim_sep".split())
BYTE_TEXT = re.compile("<0x([0-9A-Fa-f]{2})>")
# gpt-oss marks its thinking with control tokens; without them its answer cannot be read.
SHOWN_TEXTS = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))


class Tokenizer:
    """encode and decode, with what a file says about special tokens.

    bos_id, eos_id: int or None. end_ids: tokens that end an answer. n_vocab: number of tokens.
    chat_template: Jinja source or None. Tables for encoding are built at the first encode.
    """

    def __init__(self, vocabulary: Vocabulary):
        self.vocabulary = vocabulary
        self.n_vocab = len(vocabulary.tokens)
        self.bos_id = vocabulary.special_id("bos_token_id")
        self.eos_id = vocabulary.special_id("eos_token_id")
        self.chat_template = vocabulary.chat_template
        self.pre_tokenizer = pre_tokenizer(vocabulary)
        self.add_bos = vocabulary.flag("add_bos_token", self._spm or self.pre_tokenizer.add_bos)
        self.add_eos = vocabulary.flag("add_eos_token", False)
        self.add_space_prefix = vocabulary.flag("add_space_prefix", self._spm)

    @classmethod
    def from_gguf(cls, path: str | Path) -> "Tokenizer":
        """path: a model or a vocabulary-only file. Raises ModelFileError."""
        with GGUFFile.open(path, tensors=False) as file:
            return cls.from_metadata(file.metadata, str(path))

    @classmethod
    def from_metadata(cls, metadata: dict, path: str = "") -> "Tokenizer":
        """path only names the file in an error."""
        return cls(Vocabulary.from_metadata(metadata, path))

    @property
    def _spm(self) -> bool:
        return self.vocabulary.model == "llama"

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids of tokens that end an answer."""
        ids = {self._ids[text] for text in END_TEXTS if text in self._ids}
        ordinary = self._ids.get("</s>")  # Qwen and others have the HTML tag as a common word
        if ordinary is not None and self.vocabulary.kinds[ordinary] == TokenType.NORMAL:
            ids.discard(ordinary)
        ids |= {self.vocabulary.special_id(key) for key in END_KEYS} - {None}
        texts = {self.vocabulary.tokens[id] for id in ids}
        if {"<|call|>", "<|return|>"} <= texts or {"<|calls|>", "<|flush|>"} <= texts:
            ids -= {self._ids.get("<|end|>")}  # there it ends one message of several
        return frozenset(ids)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of text.

        add_special: with the BOS and EOS the file asks for, unless the text brings its own.
        parse_special: control tokens written out in the text become these tokens.
        """
        ids: list[int] = []
        after_special = True
        for piece in self._partition(valid(text), parse_special):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                prefix = " " if self.add_space_prefix and after_special else ""
                ids.extend(self._model.encode(prefix + piece))
            after_special = isinstance(piece, int)
        return self._with_ends(ids) if add_special else ids

    def _with_ends(self, ids: list[int]) -> list[int]:
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self.add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. special: with control tokens."""
        decoder = StreamDecoder(self, special)
        text = "".join([decoder.push(id) for id in ids]) + decoder.finish()
        stripped = self.add_space_prefix and text.startswith(" ")
        return text[1:] if stripped else text

    def token_bytes(self, id: int, special: bool = False) -> bytes:
        """What a token stands for; nothing for a control token unless special."""
        if not 0 <= id < self.n_vocab:
            raise InputError(
                f"token id {id}: expected one of the vocabulary, 0 to {self.n_vocab - 1}"
            )
        text, kind = self.vocabulary.tokens[id], self.kind(id)
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return text.encode() if special or text in SHOWN_TEXTS else b""
        if kind == TokenType.USER_DEFINED:
            return text.encode()
        if kind == TokenType.BYTE and (byte := BYTE_TEXT.fullmatch(text)):
            return bytes.fromhex(byte[1])
        if kind != TokenType.NORMAL:
            return b""
        return (tokenizer_spm if self._spm else tokenizer_bpe).token_bytes(text)

    def kind(self, id: int) -> int:
        """A gguf.TokenType. A token that ends answers is a control token whatever the file says."""
        return TokenType.CONTROL if id in self.end_ids else int(self.vocabulary.kinds[id])

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {text: id for id, text in enumerate(self.vocabulary.tokens)}

    @cached_property
    def _model(self) -> tokenizer_bpe.BytePairModel | tokenizer_spm.SentencePieceModel:
        vocabulary = self.vocabulary
        if self._spm:
            unknown = vocabulary.special_id("unknown_token_id")
            return tokenizer_spm.SentencePieceModel(self._ids, vocabulary.scores, unknown)
        return tokenizer_bpe.BytePairModel(self._ids, vocabulary.merges, self.pre_tokenizer)

    @cached_property
    def _special_tokens(self) -> tuple[list[int], list[int]]:
        """Ids cut out of a text before it is split, longest first: (always, with parse_special)."""
        kinds = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
        marked = set(self.vocabulary.of_kinds(kinds)) | self.end_ids
        tokens = self.vocabulary.tokens
        ordered = sorted(marked, key=lambda id: (-len(tokens[id].encode()), id))
        return [id for id in ordered if self.kind(id) == TokenType.USER_DEFINED], ordered

    def _partition(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """text cut into special tokens (int) and what lies between them."""
        pieces: list[str | int] = [text]
        for id in self._special_tokens[parse_special]:
            token = self.vocabulary.tokens[id]
            if token in text:
                pieces = [part for piece in pieces for part in cut_out(piece, token, id)]
        return (piece for piece in pieces if piece != "")


class StreamDecoder:
    """Ids in, whole characters out: a character whose bytes are spread over tokens waits."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(id, self._special))

    def finish(self) -> str:
        """U+FFFD if a character was left incomplete, else nothing."""
        return self._utf8.decode(b"", final=True)


def pre_tokenizer(vocabulary: Vocabulary) -> PreTokenizer:
    """The rule the file names; SentencePiece has none. Warns if the name is not known."""
    name = vocabulary.pre_tokenizer
    if vocabulary.model == "llama" or name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])
    found = f"pre-tokenizer {name!r} is not known" if name else "no pre-tokenizer is named"
    warnings.warn(
        f"{vocabulary.path or 'vocabulary'}: {found} (tokenizer.ggml.pre); "
        "using 'default', which may cut words differently and lower the quality",
        stacklevel=4,
    )
    return PRE_TOKENIZERS["default"]


def cut_out(piece: str | int, token: str, id: int) -> list[str | int]:
    """piece with every occurrence of token replaced by its id."""
    if isinstance(piece, int):
        return [piece]
    parts: list[str | int] = []
    for text in piece.split(token):
        parts += [text, id]
    return parts[:-1]


def valid(text: str) -> str:
    """text without lone surrogates (undecodable bytes of a command line), which become U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
