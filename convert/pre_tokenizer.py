"""The name of a tokenizer.json's pre-tokenizer, as GGUF's tokenizer.ggml.pre has it.

Known tokenizers are recognized by the hash of the ids that a test text gets (llama.cpp's way, with
its text), any other one by the structure of its pre_tokenizer: the same regular expressions give
the same words, whatever the vocabulary.
"""

import hashlib
import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from dali_gguf.errors import ConvertError

# facts of llama.cpp: the text that is encoded, and sha256 of the printed list of ids
PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis "
    "concatenated) "
    "✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 "
    "?我想在apple工作1314151天～ ------======= нещо на Български "
    "''''''```````\"\"\"\"......!!!!!!?????? "
    "I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? "
    "We'Ve a'lL"
)
HASHES = {
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
    "877081d19cf6996e2c4ff0e1236341e9b7bde288f5311a56a937f0afbbb3aeb5": "deepseek-v3",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "d30d75d9059f1aa2c19359de71047b3ae408c70875e8a3ccf8c5fba56c9d8af4": "qwen35",
    "1444df51289cfa8063b96f0e62b1125440111bc79a52003ea14b6eac7016fd5f": "qwen35",
    "b6dc8df998e1cfbdc4eac8243701a65afe638679230920b50d6f17d81c098166": "olmo",
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
    "0fe1cf6eda062318a1af7270f3331a85c539a01778ff948e24388e949c5282f4": "gpt-2",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "35d91631860c815f952d711435f48d356ebac988362536bed955d43bfa436e34": "starcoder",
    "6221ad2852e85ce96f791f476e0b390cf9b474c9e3d1362f53a24a06dc8220ff": "refact",
    "9c2227e4dd922002fb81bde4fc02b0483ca4f12911410dee2255e4987644e3f8": "command-r",
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "0e9433cbbb161f89e264eb32e8e64bfe69e834973ffca5d41d3948a604a3e2a3": "pixtral",
    "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
    "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",
    "d353350c764d8c3b39c763113960e4fb4919bea5fbf208a0e3b22e8469dc7406": "llama4",
    "d4c8f286ea6b520b3d495c4455483cfa2302c0cfcd4be05d781b6a8a0a7cdaf1": "megrez",
    "81212dc7cdb7e0c1074ca62c5aeab0d43c9f52b8a737be7b12a777c953027890": "kimi-k2",
}
# names whose regular expressions (dali_gguf.tokenizer_patterns) are compared with an unknown file
STRUCTURES = (
    "gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "deepseek-llm", "deepseek-coder",
    "deepseek-v3",
    "gpt-4o", "tekken", "kimi-k2", "seed-coder",
)  # fmt: skip


def recognize(path: Path, tokenizer: dict) -> str:
    """The pre-tokenizer's name of a tokenizer.json; raises ConvertError with what it holds."""
    ids = Tokenizer.from_file(str(path)).encode(PROBE).ids
    known = HASHES.get(hashlib.sha256(str(ids).encode()).hexdigest())
    if known:
        return known
    regexes = tuple(map(canonical, structure(tokenizer.get("pre_tokenizer") or {})))
    for name in STRUCTURES:
        if regexes in forms(name):
            return name
    shown = json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=False)[:200]
    raise ConvertError(
        f"{path}: its pre-tokenizer is not one this version knows: {shown}; "
        "name the nearest with --pre (for example qwen2 or llama-bpe)"
    )


def structure(node: dict) -> list[str]:
    """The regular expressions of a pre_tokenizer, in the order they cut."""
    from dali_gguf.tokenizer_patterns import GPT2

    kind = node.get("type")
    if kind == "Sequence":
        return [regex for part in node["pretokenizers"] for regex in structure(part)]
    if kind == "Split":
        pattern = node["pattern"]
        return [pattern["Regex"] if "Regex" in pattern else re.escape(pattern["String"])]
    if kind == "Digits":
        return [r"\p{N}" if node.get("individual_digits") else r"\p{N}+"]
    if kind == "ByteLevel":
        return [GPT2] if node.get("use_regex", True) else []
    return [f"<{kind}>"]


def forms(name: str) -> list[tuple[str, ...]]:
    """The rule of a name as canonical regular expressions, in every spelling that files have."""
    from dali_gguf.tokenizer_patterns import PRE_TOKENIZERS

    rule = tuple(map(canonical, PRE_TOKENIZERS[name].regexes))
    # deepseek-llm's file cuts numbers into digits; BPE merges none of them, so both are the same
    return [rule, rule[:-1] + (r"\p{N}",)] if name == "deepseek-llm" else [rule]


def canonical(regex: str) -> str:
    """Spellings that mean the same made equal: the order of contractions, and digits as \\d."""
    regex = re.sub(r"\(\?i:('[^)]*)\)", _contractions, regex)
    return regex.replace(r"\d", r"\p{N}")


def _contractions(match: re.Match) -> str:
    return "(?i:" + "|".join(sorted(match[1].split("|"))) + ")"
