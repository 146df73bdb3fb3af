"""Chat templates: what transformers' templates use, and what broken ones say."""

import pytest

from dali_gguf.chat import ChatTemplate
from dali_gguf.errors import ModelFileError
from dali_gguf.tokenizer import Tokenizer
from tests import vocabularies

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi <b> & 'you'"}]


def test_one_user_turn():
    template = ChatTemplate(CHATML)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.user_turn("Hi") == expected
    assert template.user_turn("Hi", "Be brief") == (
        "<|im_start|>system\nBe brief<|im_end|>\n" + expected
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi <b> & 'you'</s>"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi <b> & \'you\'"}]'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {%- if tools is defined %}t{% else %}none{% endif %}", "none"),
        ("{% if true %}\n  {% set x = 1 %}\nline\n{% endif %}\n", "line\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m(1) }}{{ 'a,b'.split(',')[-1] }}", "[1]b"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
    ],
)
def test_what_templates_use(source, expected):
    assert ChatTemplate(source, "<s>", "</s>").render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "the chat template fails"),
        ("{{ raise_exception('roles must alternate') }}", "fails: roles must alternate; --raw"),
        ("{{ messages[5].content }}", "the chat template fails"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "the chat template fails"),
    ],
)
def test_a_broken_template_is_one_line(source, message):
    with pytest.raises(ModelFileError, match=message) as raised:
        ChatTemplate(source, path="m.gguf").render(MESSAGES)
    text = str(raised.value)
    assert text.startswith("m.gguf: ") and "\n" not in text and len(text) < 300


def test_names_of_tokens_come_from_the_file():
    keys = vocabularies.metadata("spm") | {
        "tokenizer.chat_template": "{{ bos_token }}[X]{{ eos_token }}"
    }
    tokenizer = Tokenizer.from_metadata(keys)
    text = ChatTemplate.of(tokenizer).user_turn("x")
    assert text == "<s>[X]</s>"
    ids = tokenizer.encode(text, parse_special=True)
    assert ids[0] == 1 and ids.count(1) == 1 and ids[-1] == 2
    assert ChatTemplate.of(Tokenizer.from_metadata(vocabularies.metadata("spm"))) is None
