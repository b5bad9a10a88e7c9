"""A model whose KV is a function of the tokens before it, so that each byte can be checked.

As in a real model, the row of a token depends on the layer and on all tokens up to it, and the next
token on all rows. Two prompts that share a prefix share its rows, so prefix caching is right here
for the same reason as in vLLM.
"""

from zlib import crc32

import numpy as np
from builders import equal_stage

BLOCK_TOKENS = 16
LAYERS = 6
ROW_WORDS = 288  # 64-bit words: 576 float32, what MLA on CPU keeps
PAGE_BYTES = BLOCK_TOKENS * ROW_WORDS * 8
VOCABULARY = 500

STAGE = equal_stage(LAYERS, page_bytes=PAGE_BYTES)
LAYER_NAMES = [bundle.components[0].layer_name for bundle in STAGE.targets]

_COLUMNS = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)


def _mix(values):
    """Spread each 64-bit word (splitmix64)."""
    values = values + np.uint64(0x9E37_79B9_7F4A_7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


def poison(name):
    """What a node leaves in blocks that it lets go; no row, and no other node's poison."""
    return _mix(np.uint64(crc32(name.encode())))


def prefixes(tokens, weights=0):
    """One word per token that depends on it, on all tokens before it, and on the weights."""
    tokens = np.asarray(tokens, dtype=np.uint64)
    places = np.arange(len(tokens), dtype=np.uint64) << np.uint64(20)
    return _mix(np.cumsum(_mix(tokens + places)) + (np.uint64(weights) << np.uint64(40)))


def rows(prefix_words, layer):
    """What a layer keeps for tokens: shape (tokens, ROW_WORDS)."""
    return _mix(prefix_words + np.uint64(layer))[:, None] ^ _COLUMNS


def next_token(tokens):
    """The model's answer to a sequence of tokens."""
    return int(prefixes(tokens)[-1] % np.uint64(VOCABULARY))


def continuation(prompt, count):
    """The tokens that the model generates."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
