"""Names and signatures: only holders of the key write what is read, and only under the name it was written for."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.deployment import MAC_BYTES, Deployment, deployment_key
from ktransformer2.tiers.header import HEADER_BYTES
from tests.tiers.disk_factories import PAYLOAD_BYTES, block, key_of, lineage

KEY = b"0123456789abcdef"


def opened(deployment: Deployment, key: bytes, value: bytes) -> bytes | None:
    """The payload, as the tier opens a value."""
    whole = deployment.unseal(key, value) if deployment.is_signed(key, value) else None
    return None if whole is None else bytes(whole[1])


def test_a_value_is_opened_by_whoever_has_the_key() -> None:
    one = block("a1", "a0")
    value = Deployment(KEY, lineage()).seal(one, 1000.0)
    other = Deployment(KEY, lineage())
    assert len(value) == other.value_bytes(0) == HEADER_BYTES + PAYLOAD_BYTES + MAC_BYTES
    assert opened(other, one.key, value) == one.payload
    header = other.header(one.key, value[:HEADER_BYTES])
    assert header is not None
    assert (header.parent, header.num_tokens, header.written_s) == (key_of("a0"), 64, 1000)


def test_no_other_key_name_or_byte_opens_it() -> None:
    one, two, deployment = block("a"), block("b"), Deployment(KEY, lineage())
    value = deployment.seal(one, 0.0)
    assert opened(Deployment(KEY + b"!", lineage()), one.key, value) is None
    assert opened(deployment, two.key, value) is None
    assert opened(Deployment(KEY, lineage("other")), one.key, value) is None
    chance = random.Random(5)
    for _ in range(200):
        broken = bytearray(value)
        broken[chance.randrange(len(value))] ^= 1 << chance.randrange(8)
        assert opened(deployment, one.key, bytes(broken)) is None
    for length in (0, 1, 31, 32, 33, HEADER_BYTES, len(value) - 1):
        assert opened(deployment, one.key, value[:length]) is None
    assert opened(deployment, one.key, value + b"\0") is None


def test_a_signature_does_not_make_up_for_a_header() -> None:
    """Signed, but not a block of this lineage: as a holder of the key with another version would write."""
    one, deployment = block("a"), Deployment(KEY, lineage())
    content = b"?" * (deployment.value_bytes(0) - MAC_BYTES)
    value = content + deployment._digest(deployment.name(one.key), content)
    assert deployment.is_signed(one.key, value)
    assert deployment.unseal(one.key, value) is None


def test_names_tell_format_deployment_lineage_and_block() -> None:
    deployment = Deployment(KEY, lineage())
    name = deployment.name(key_of("a", 1))
    parts = name.decode().split(":")
    assert (parts[:2], [len(part) for part in parts[2:]]) == (["kt2", "1"], [16, 32, 66])
    assert deployment.key(name) == key_of("a", 1)
    assert deployment.names.startswith(deployment.all_names)
    others = [Deployment(KEY + b"!", lineage()), Deployment(KEY, lineage("other"))]
    others += [Deployment(KEY, replace(lineage(), payload_bytes=(1,)))]
    assert [other.key(name) for other in others] == [None, None, None]
    assert [other.all_names == deployment.all_names for other in others] == [False, True, True]
    for strange in (
        b"",
        name[:-1],
        name + b"0",
        name[:-2] + b"zz",
        name[:-1] + b"\xff",
        name[:-2] + b"  ",
        name.upper(),
    ):
        assert deployment.key(strange) is None


def test_the_key_comes_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(KEY + b"\n")
    assert deployment_key(file, {}) == KEY
    assert deployment_key(None, {"KTRANSFORMER_VALKEY_KEY": f" {KEY.decode()} "}) == KEY
    for content in (b"", b" \n", b"s3cret"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=str(file)) as caught:
            deployment_key(file, {})
        assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        deployment_key(tmp_path, {})
    with pytest.raises(ConfigError, match="KTRANSFORMER_VALKEY_KEY holds no key"):
        deployment_key(None, {})
