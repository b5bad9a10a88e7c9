import pytest

from kvpp_connect.errors import ConfigError
from kvpp_connect.planning.units import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GiB", 40 * 2**30),
        ("40gb", 40 * 10**9),
        ("1.5 KiB", 1536),
        ("200_000_000", 200_000_000),
        ("7", 7),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read_with_and_without_units(text, size):
    assert parse_bytes(text, "--kv-memory") == size


@pytest.mark.parametrize("text", ["", "40G", "GiB", "-1", "1e9", "nan", "0", "0.5B", "40GiB/s"])
def test_what_is_no_size_is_refused_by_name(text):
    with pytest.raises(ConfigError, match=r"--kv-memory is .*; expected"):
        parse_bytes(text, "--kv-memory")


def test_rates_count_bits_and_bytes_apart():
    assert parse_rate("50GB/s", "--link") == 50e9
    assert parse_rate("400Gbit/s", "--link") == 50e9
    assert parse_rate("1GiB/s", "--link") == 2**30
    for text in ("50GB", "0GB/s", "400Gb/s/s"):
        with pytest.raises(ConfigError, match="--link"):
            parse_rate(text, "--link")


def test_times_are_seconds():
    assert parse_seconds("300us", "--layer-time") == pytest.approx(3e-4)
    assert parse_seconds("0.3ms", "--layer-time") == pytest.approx(3e-4)
    with pytest.raises(ConfigError, match="--layer-time"):
        parse_seconds("0s", "--layer-time")


def test_quantities_are_written_in_the_largest_unit_that_fits():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**30)] == [
        "0 B",
        "1,023 B",
        "1.00 KiB",
        "3.00 GiB",
    ]
    assert [format_seconds(s) for s in (2, 2e-3, 2e-6)] == ["2.00 s", "2.00 ms", "2.00 us"]
