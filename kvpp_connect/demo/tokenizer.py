"""A byte-level BPE tokenizer built from nothing, so that test models need no download.

Every byte is a token of its own; the merges join pairs of lower-case letters only. Text without
lower-case letters therefore has exactly one token per character, which makes prompts of an exact
length easy to write.
"""

from pathlib import Path

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>", "<unk>")
BOS_ID, EOS_ID, PAD_ID, UNK_ID = range(4)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
)
_MERGED_LETTERS = "etaoinshrdlucmfw"


def write_tokenizer(path: Path, *, vocab_size: int, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json into `path`.

    Args:
        path: an existing directory.
        vocab_size: tokens in all, at least 260 (4 specials and 256 bytes), at most 516.
        max_tokens: longest sequence that the model takes.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    pairs = [(a, b) for a in _MERGED_LETTERS for b in _MERGED_LETTERS]
    if not len(tokens) <= vocab_size <= len(tokens) + len(pairs):
        raise ValueError(
            f"vocab_size must be {len(tokens)} to {len(tokens) + len(pairs)}, got {vocab_size}"
        )
    merges = pairs[: vocab_size - len(tokens)]
    tokens += [a + b for a, b in merges]
    vocab = {token: number for number, token in enumerate(tokens)}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL_TOKENS[UNK_ID]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        unk_token=SPECIAL_TOKENS[UNK_ID],
        model_max_length=max_tokens,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(path)
