"""A block's name stands for its tokens, all before it, and whatever else decides about its KV."""

from hypothesis import given
from hypothesis import strategies as st

from kvpp_connect.connectors.ascend_store.hashing import BlockChain

TOKENS = st.lists(st.integers(0, 200_000), max_size=60)


def hashes(tokens, size=4, extra=None):
    chain = BlockChain(size, extra)
    chain.extend(tokens)
    return chain.hashes


@given(TOKENS, st.lists(st.integers(0, 60)))
def test_a_chain_grown_in_steps_is_the_chain_of_all_tokens(tokens, stops):
    grown = BlockChain(4)
    for stop in sorted(stops):
        grown.extend(tokens[:stop])
    grown.extend(tokens)
    assert grown.hashes == hashes(tokens)
    assert len(grown.hashes) == len(tokens) // 4


@given(TOKENS, TOKENS)
def test_two_prompts_share_names_exactly_as_far_as_their_blocks_are_the_same(a, b):
    same = 0
    while (same + 1) * 4 <= min(len(a), len(b)) and a[: (same + 1) * 4] == b[: (same + 1) * 4]:
        same += 1
    pairs = list(zip(hashes(a), hashes(b), strict=False))
    assert [x == y for x, y in pairs] == [True] * same + [False] * (len(pairs) - same)


def test_what_is_not_a_token_changes_the_names_from_its_block_on():
    plain = hashes(range(12))
    salted = hashes(range(12), extra=lambda start, end: b"image" if start <= 5 < end else b"")
    assert [a == b for a, b in zip(plain, salted, strict=True)] == [True, False, False]


def test_names_are_the_same_in_every_process():
    assert hashes([1, 2, 3, 4])[0].hex() == (
        "37560042dd9077c2726e95f0eaa585ecab6afb9b9ea63fb1defb80721d45b642"
    )


@given(TOKENS)
def test_a_tail_has_a_name_of_its_own(tokens):
    chain = BlockChain(4)
    tail = chain.tail(tokens)
    assert (tail is None) == (len(tokens) % 4 == 0)
    assert tail not in chain.hashes
    if tail is not None:
        assert tail != BlockChain(4).tail([*tokens[:-1], tokens[-1] + 1])
