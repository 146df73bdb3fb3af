"""The smallest SentencePiece vocabulary: every byte, and a few words."""

import gguf

BYTES = [f"<0x{i:02X}>" for i in range(256)]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *(f"\u2581w{i}" for i in range(29))]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 29]
N_VOCAB, N_CTX, D = len(TOKENS), 256, 64


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(i) for i in range(N_VOCAB)])
    writer.add_token_types(TYPES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
