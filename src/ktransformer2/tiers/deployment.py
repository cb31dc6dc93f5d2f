"""Who shares blocks on one server: the holders of a deployment's key. How their keys are named and their values signed.

A checksum finds damage; it does not find a server, or somebody else on it, that answers with bytes of its own. So each
value ends with an HMAC-SHA256 over its name and all that is before it: what was not written by a holder of the key, or
was written under another name, is not read.

    name    kt2:<format>:<deployment>:<lineage>:<block key>, all but the first in hexadecimal
    value   header, payload, 32 bytes of HMAC

Knows bytes only. The key is never shown, logged or sent; the deployment in a name is a digest of it.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from ktransformer2.errors import ConfigError
from ktransformer2.tiers.header import HEADER_BYTES, BlockHeader
from ktransformer2.tiers.tier import KEY_BYTES, Lineage, StoredBlock

KEY_VARIABLE = "KTRANSFORMER_VALKEY_KEY"
LEAST_KEY_BYTES = 16
MAC_BYTES = 32
_NAME_FORMAT = 1
_MOST_KEY_BYTES = 4096
_MAKE_ONE = "make one with: openssl rand -hex 32"


def deployment_key(file: Path | None, environ: Mapping[str, str] = os.environ) -> bytes:
    """The key from `file`, else from KTRANSFORMER_VALKEY_KEY; white space around it does not count.

    Raises: ConfigError, which never shows it, where there is none, it cannot be read, or it is too short.
    """
    if file is None:
        place, key = KEY_VARIABLE, environ.get(KEY_VARIABLE, "").encode()
    else:
        place = str(file)
        try:
            with file.open("rb") as opened:
                key = opened.read(_MOST_KEY_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{place}: the deployment's key cannot be read ({error.strerror}); {_MAKE_ONE}"
            ) from error
    key = key.strip()
    if not key:
        raise ConfigError(f"{place} holds no key: blocks on a shared server are signed with one; {_MAKE_ONE}")
    if len(key) < LEAST_KEY_BYTES:
        raise ConfigError(f"{place}: a key of {len(key)} bytes is not allowed; allowed: {LEAST_KEY_BYTES} or more")
    return key


class Deployment:
    """Names and signatures under one key, for the blocks of one lineage."""

    def __init__(self, key: bytes, lineage: Lineage) -> None:
        assert len(key) >= LEAST_KEY_BYTES, f"a key of {len(key)} bytes"
        self._mac = hmac.new(key, digestmod=sha256)
        self._lineage = lineage
        tag = self._digest(b"the name of a deployment")[:8].hex()
        self.all_names = f"kt2:{_NAME_FORMAT}:{tag}:".encode()  # what the names of all lineages begin with
        self.names = self.all_names + _lineage_digest(lineage).hex().encode() + b":"

    def name(self, key: bytes) -> bytes:
        """Under which name the block lies."""
        return self.names + key.hex().encode()

    def key(self, name: bytes) -> bytes | None:
        """The block that lies under a name; None: no name of this deployment and lineage."""
        if not name.startswith(self.names) or len(name) != len(self.names) + 2 * KEY_BYTES:
            return None
        try:
            key = bytes.fromhex(name[len(self.names) :].decode("ascii"))
        except ValueError:
            return None
        return key if self.name(key) == name else None  # white space and capitals are read, but never written

    def value_bytes(self, group: int) -> int:
        """What a block of a layer group takes as a value."""
        return HEADER_BYTES + self._lineage.payload_bytes[group] + MAC_BYTES

    def seal(self, block: StoredBlock, now_s: float) -> bytes:
        """The value of a block."""
        header = BlockHeader.describe(block, self._lineage, now_s).pack()
        return b"".join((header, block.payload, self._digest(self.name(block.key), header, block.payload)))

    def is_signed(self, key: bytes, value: bytes) -> bool:
        """Whether a holder of the key wrote `value` under the name of that block."""
        signed = memoryview(value)[:-MAC_BYTES]
        return hmac.compare_digest(self._digest(self.name(key), signed), value[-MAC_BYTES:])

    def unseal(self, key: bytes, value: bytes) -> tuple[BlockHeader, bytearray] | None:
        """The header and payload of a value whose signature is right; None: it is not that block, or not whole."""
        header = BlockHeader.unpack(value)
        if header is None or not header.is_of(self._lineage, key):
            return None
        payload = memoryview(value)[HEADER_BYTES:-MAC_BYTES]
        return (header, bytearray(payload)) if header.vouches_for(payload) else None

    def header(self, key: bytes, start: bytes) -> BlockHeader | None:
        """The header at the start of a value, unsigned: a hint of what the block follows, no more."""
        header = BlockHeader.unpack(start)
        return header if header is not None and header.is_of(self._lineage, key) else None

    def _digest(self, *parts: bytes | bytearray | memoryview) -> bytes:
        mac = self._mac.copy()
        for part in parts:
            mac.update(part)
        return mac.digest()


def _lineage_digest(lineage: Lineage) -> bytes:
    """16 bytes that two lineages share only if their blocks are readable for each other."""
    digest = sha256(lineage.fingerprint)
    for layout, size in zip(lineage.layouts, lineage.payload_bytes, strict=True):
        digest.update(layout + size.to_bytes(8, "little"))
    return digest.digest()[:16]
