import pytest

from kvpp_connect.config import KvppConfig, parse_additional_config
from kvpp_connect.errors import ConfigError


@pytest.mark.parametrize("value", [True, "true", "True", "TRUE"])
def test_kvpp_is_on_for_true_in_any_case(value):
    assert parse_additional_config({"enable_kvpp": value}).enabled


@pytest.mark.parametrize("value", [False, "false", "FALSE"])
def test_kvpp_is_off_for_false_in_any_case(value):
    assert not parse_additional_config({"enable_kvpp": value}).enabled


@pytest.mark.parametrize("value", [1, 0, "yes", "1", None, [], {}, 1.0, ""])
def test_anything_else_is_refused_by_name(value):
    with pytest.raises(ConfigError, match=r"additional_config\.enable_kvpp is"):
        parse_additional_config({"enable_kvpp": value})


@pytest.mark.parametrize("config", [{}, None, {"other_plugin": {"x": 1}}])
def test_kvpp_is_off_by_default_and_other_keys_are_none_of_our_business(config):
    assert parse_additional_config(config) == KvppConfig()


def test_unknown_keys_are_refused_with_the_nearest_right_one():
    with pytest.raises(ConfigError, match=r"'mod'; did you mean 'mode'"):
        parse_additional_config({"enable_kvpp": True, "kvpp": {"mod": "full"}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"additional_config\.kvpp is \[\]"),
        ({"mode": "fast"}, r"kvpp\.mode is 'fast'; expected one of: auto, full, compact"),
        ({"mode": "compact", "running_tokens": 0}, "running_tokens is 0"),
        ({"mode": "compact", "running_tokens": "9"}, "running_tokens is '9'"),
        ({"mode": "full", "running_tokens": 9}, 'no meaning with "mode": "full"'),
        ({"mode": []}, r"kvpp\.mode is \[\]; expected"),
        ({"transport": "gloo"}, "'gloo'; expected one of: auto, collective, shared_memory"),
        ({"transport": None}, r"kvpp\.transport is None"),
        ({"transports": "auto"}, "did you mean 'transport'"),
        ({"broadcast_timeout_s": 0}, "broadcast_timeout_s is 0"),
        ({"broadcast_timeout_s": True}, "broadcast_timeout_s is True"),
        ({"broadcast_timeout_s": "9"}, "broadcast_timeout_s is '9'"),
    ],
)
def test_wrong_values_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_additional_config({"enable_kvpp": True, "kvpp": options})


@pytest.mark.parametrize("transport", ["auto", "collective", "shared_memory"])
def test_the_transport_can_be_chosen_and_is_found_out_otherwise(transport):
    parsed = parse_additional_config({"enable_kvpp": True, "kvpp": {"transport": transport}})
    assert parsed.transport == transport
    assert parse_additional_config({"enable_kvpp": True}).transport == "auto"


def test_the_users_configuration_is_not_modified():
    given = {"enable_kvpp": "true", "kvpp": {"mode": "full"}}
    parse_additional_config(given)
    assert given == {"enable_kvpp": "true", "kvpp": {"mode": "full"}}
