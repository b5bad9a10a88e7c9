import pytest

pytest.importorskip("zmq")

from kvpp_connect.connectors.mooncake_v2.secret import derive_keys, load_keys
from kvpp_connect.errors import ConfigError

SECRET = b"0123456789abcdef"


def test_both_nodes_derive_the_same_keys_and_no_pair_equals_another():
    keys = derive_keys(SECRET)
    assert keys == derive_keys(SECRET)
    other = derive_keys(SECRET + b"x")
    pairs = [keys.server, keys.client, other.server, other.client]
    assert len({pair.public for pair in pairs} | {pair.private for pair in pairs}) == 8


def test_the_secret_part_is_never_shown():
    keys = derive_keys(SECRET)
    for private in (keys.server.private, keys.client.private):
        assert private.decode() not in repr(keys)


def test_only_the_derived_client_is_let_in():
    keys = derive_keys(SECRET)
    assert keys.callback("", keys.client.public)
    for key in (keys.server.public, derive_keys(SECRET + b"x").client.public, b""):
        assert not keys.callback("", key)


def test_white_space_around_the_secret_does_not_count(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(b"  " + SECRET + b"\n")
    assert load_keys(str(path)) == derive_keys(SECRET)
    assert load_keys("") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*No such file"),
        (b"", "holds 0 bytes, expected at least 16"),
        (b"fifteen bytes..\n\n", "holds 15 bytes, expected at least 16"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"control_secret_file: .*{message}"):
        load_keys(str(path))


def test_a_directory_is_no_secret(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        load_keys(str(tmp_path))
