"""URLs taken apart, and what people see of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.valkey_address import ValkeyAddress


@pytest.mark.parametrize(
    ("url", "shown", "options"),
    [
        ("valkey://cache", "valkey://cache:6379/0", {"host": "cache", "port": 6379, "db": 0}),
        ("redis://cache:7000/3", "redis://cache:7000/3", {"host": "cache", "port": 7000, "db": 3}),
        (
            "valkey://me:s%40cret@[::1]:7000",
            "valkey://[::1]:7000/0",
            {"host": "::1", "port": 7000, "db": 0, "username": "me", "password": "s@cret"},
        ),
        (
            "redis://:s3cret@cache",
            "redis://cache:6379/0",
            {"host": "cache", "port": 6379, "db": 0, "password": "s3cret"},
        ),
        (
            "valkeys://cache",
            "valkeys://cache:6379/0",
            {
                "host": "cache",
                "port": 6379,
                "db": 0,
                "ssl": True,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            },
        ),
        ("unix:///run/kv.sock?db=2", "unix:///run/kv.sock", {"unix_socket_path": "/run/kv.sock", "db": 2}),
    ],
)
def test_a_url_is_taken_apart_and_shown_without_its_password(url: str, shown: str, options: dict[str, Any]) -> None:
    address = ValkeyAddress(url)
    assert (address.shown, address.options) == (shown, options)
    assert "cret" not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "valkey://",
        "valkey://:s3cret@",
        "valkey://u:s3cret@cache:port",
        "valkey://u:s3cret@cache:99999",
        "valkey://u:s3cret@cache/one",
        "valkey://u:s3cret@cache/-1",
        "valkey://u:s3cret@cache?ssl_cert_reqs=none",
        "valkeys://u:s3cret@cache?ssl_cert_reqs=none",
        "valkeys://u:s3cret@cache?ssl_ca_certs=/no/such/file",
        "valkey://u:s3cret@cache#part",
        "valkey://u:s3cret@[::1",
        "unix://",
        "unix:///run/kv.sock?db=x",
    ],
)
def test_a_url_that_is_not_understood_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ValkeyAddress(url)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__context__ is None or "s3cret" not in str(caught.value.__context__)


def test_certificates_are_files(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    options = ValkeyAddress(f"rediss://cache?ssl_ca_certs={tmp_path}/ca.pem").options
    assert options["ssl_ca_certs"] == f"{tmp_path}/ca.pem"


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("ttl_s", 0.5),
        ("timeout_s", 0.0),
        ("timeout_s", 61.0),
        ("max_value_bytes", 0),
        ("max_value_bytes", 2**29 + 1),
        ("bloom_refresh_s", 0.5),
        ("ttl_s", float("nan")),
    ],
)
def test_limits_are_checked(limit: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{limit}={value}"):
        ValkeyAddress("valkey://cache", **{limit: value})
