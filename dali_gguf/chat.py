"""The chat template of a model: a Jinja2 program from the file, run in a sandbox.

Templates are written for Hugging Face transformers, so they get the names and settings they have
there: raise_exception, strftime_now, tojson without HTML escapes, loop controls, {% generation %}.
"""

import datetime
import json

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dali_gguf.errors import ModelFileError
from dali_gguf.tokenizer import Tokenizer

LONGEST_REASON = 200


class GenerationBlock(Extension):
    """{% generation %} .. {% endgeneration %} marks text for training; here it is just text."""

    tags = {"generation"}

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    def __init__(self, source: str, bos: str = "", eos: str = "", path: str = ""):
        """bos, eos: texts of these tokens. Raises ModelFileError if source is no Jinja2."""
        self._path = path
        self._names = {"bos_token": bos, "eos_token": eos}
        try:
            self._template = environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise self._broken(error) from None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template of a model, None if it has none."""
        if not tokenizer.chat_template:
            return None
        vocabulary = tokenizer.vocabulary
        bos, eos = (
            "" if id is None else vocabulary.tokens[id]
            for id in (tokenizer.bos_id, tokenizer.eos_id)
        )
        return cls(tokenizer.chat_template, bos, eos, vocabulary.path)

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt after which the assistant answers. messages: role and content."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except Exception as error:  # whatever the program in the file runs into
            raise self._broken(error) from None

    def user_turn(self, text: str, system: str | None = None) -> str:
        before = [] if system is None else [{"role": "system", "content": system}]
        return self.render([*before, {"role": "user", "content": text}])

    def _broken(self, error: Exception) -> ModelFileError:
        where = f"{self._path}: " if self._path else ""
        reason = " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
        return ModelFileError(
            f"{where}the chat template fails: {reason}; --raw gives the prompt without it"
        )


def environment() -> ImmutableSandboxedEnvironment:
    extensions = ("jinja2.ext.loopcontrols", GenerationBlock)
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = strftime_now
    return jinja


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
