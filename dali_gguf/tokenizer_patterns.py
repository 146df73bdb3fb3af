"""The regular expressions that cut text into words before BPE, by `tokenizer.ggml.pre`.

They are those of the models' own tokenizer.json files. The regexes of a rule are applied in turn:
each match becomes a piece of its own, each piece goes on to the next regex, and what lies between
the matches is a piece too.
"""

from dataclasses import dataclass

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{TAIL}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{TAIL}"
QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{WORD}|\p{{N}}|{TAIL}".replace(r"\s*[\r\n]+", r"\s*[\r\n]")
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (  # cased letters of an older Unicode: \p{Lu} and \p{Ll} hold 1360 more
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤ"
    "Ⳬ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
IDEOGRAPHS_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
THREES_FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*\b)"
NO_SENTENCE_SIGNS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def cased(digits: str, suffix: str = "", without: str = "", line_end: str = r"\r\n/") -> str:
    """o200k's pattern: a word also ends where lower case turns to upper.

    digits: the alternative for numbers; suffix: what may follow a word; without: `&&[^..]`
    narrows the letters; line_end: what a run of signs takes along.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    tail = rf" ?[^\s\p{{L}}\p{{N}}]+[{line_end}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{digits}|{tail}"


GPT4O = cased(r"\p{N}{1,3}", rf"{CONTRACTION}?")
KIMI = cased(r"\p{N}{1,3}", rf"{CONTRACTION}?", r"&&[^\p{Han}]", r"\r\n")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """whole_words: a word that is a token needs no merges. add_bos: unless the file says no."""

    regexes: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
RULES = (
    ("default", DEFAULT),
    (
        "gpt-2 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum modern-bert "
        "exaone4 roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        PreTokenizer((GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", GPT2)),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((LLAMA3,))),
    ("glm4 glm5", PreTokenizer((LLAMA3,), whole_words=True)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2",
        PreTokenizer((QWEN2,)),
    ),
    ("qwen35", PreTokenizer((QWEN35,))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{DEEPSEEK_LETTERS}]+",
                rf"\s?[{DEEPSEEK_SIGNS}]+",
                r"\s+$",
                IDEOGRAPHS,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", IDEOGRAPHS_KANA, DEEPSEEK_V3)),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((GPT4O,))),
    ("tiny_aya cohere2moe", PreTokenizer((THREES_FROM_THE_RIGHT, GPT4O))),
    ("tekken", PreTokenizer((cased(r"\p{N}"),), whole_words=True, add_bos=True)),
    ("kimi-k2", PreTokenizer((r"\p{Han}+", KIMI))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((BAILING,))),
    ("seed-coder", PreTokenizer((SEED_CODER,))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", LLAMA3), whole_words=True)),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((NO_SENTENCE_SIGNS,))),
    ("viking", PreTokenizer((NO_SENTENCE_SIGNS, r"\p{N}"))),
)
PRE_TOKENIZERS = {name: rule for names, rule in RULES for name in names.split()}
