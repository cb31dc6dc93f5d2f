"""Who may ask, and under which salt their prefixes lie. Knows no HTTP but the header's form.

Invariants: a salt is made on the server out of the key, so nobody can name another's; comparing takes as long for a
wrong key as for a right one; no key is ever part of a message.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from ktransformer2.errors import ConfigError

LEAST_KEY_CHARACTERS = 16
_COMMENT = re.compile(r"(^|\s)#.*")  # a key may hold one
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Caller:
    """Somebody with a name. `secret` is what their salts are made of; empty: they share prefixes with all such."""

    name: str
    secret: bytes = field(default=b"", repr=False)
    is_admin: bool = False

    def salt(self, cache_salt: str = "") -> bytes:
        """The salt of their requests; a `cache_salt` of theirs keeps some apart from the others."""
        if not self.secret and not cache_salt:
            return b""
        own = cache_salt.encode("utf-8", "surrogatepass")
        fields = b"".join(len(field).to_bytes(8, "little") + field for field in (b"ktransformer salt 1", own))
        return hmac.digest(self.secret, fields, hashlib.sha256)


LOCAL = Caller("local", is_admin=True)


class Keys:
    """The keys of a server. None: whoever reaches it is `LOCAL`."""

    def __init__(self, keys: Sequence[tuple[str, str, bool]] = (), *, share_prefixes: bool = False) -> None:
        """`keys`: name, key, and whether it may look into the cache. `share_prefixes`: one salt for all."""
        self._callers = {
            hashlib.sha256(key.encode()).digest(): Caller(name, b"" if share_prefixes else key.encode(), is_admin)
            for name, key, is_admin in keys
        }

    @classmethod
    def read(cls, path: Path, *, share_prefixes: bool = False) -> Self:
        """A file of lines `NAME KEY` or `NAME KEY admin`; `#` begins a comment. Raises: ConfigError."""
        try:
            if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{path} can be read by others; chmod 600 {path}")
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"{path} cannot be read ({type(error).__name__})") from error
        found: list[tuple[str, str, bool]] = []
        for number, line in enumerate(lines, 1):
            words = _COMMENT.sub("", line).split()
            if not words:
                continue
            if len(words) not in (2, 3) or words[2:] not in ([], ["admin"]) or not _NAME.fullmatch(words[0]):
                raise ConfigError(f"{path}, line {number}: wanted is NAME KEY, or NAME KEY admin")
            if len(words[1]) < LEAST_KEY_CHARACTERS or not words[1].isascii():
                raise ConfigError(f"{path}, line {number}: a key has {LEAST_KEY_CHARACTERS} ASCII characters or more")
            found.append((words[0], words[1], len(words) == 3))
        if not found:
            raise ConfigError(f"{path} holds no key; write a line NAME KEY")
        if len({name for name, _, _ in found}) < len(found) or len({key for _, key, _ in found}) < len(found):
            raise ConfigError(f"{path} names somebody, or a key, twice")
        return cls(found, share_prefixes=share_prefixes)

    @classmethod
    def made(cls) -> tuple[Self, str]:
        """One new key, which may do everything."""
        key = f"kt-{secrets.token_urlsafe(32)}"
        return cls([("default", key, True)]), key

    @property
    def are_needed(self) -> bool:
        return bool(self._callers)

    def caller(self, authorization: str) -> Caller | None:
        """Whose key the header `Authorization: Bearer KEY` has; None: nobody's."""
        if not self._callers:
            return LOCAL
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        found = None
        for known, caller in self._callers.items():  # to the end, also when it was found
            if hmac.compare_digest(known, digest):
                found = caller
        return found
