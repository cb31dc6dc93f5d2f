"""When blocks with a time to live expire, so that no parent does before its child. Pure; knows no server.

Every expiry is a moment on the server's clock, the end of the time to live rounded up to a sixteenth of it. So what is
used in the same sixteenth, by whichever process, has the same expiry, and a chain that was renewed once is left alone
until the next: a use costs no command for each block before it.

Invariants: `due` names a block only together with all blocks before it that are not renewed to that moment yet, roots
first; what is remembered is bounded. Any thread: each access is one look into a dict, and what is missing is ROOT.
"""

from __future__ import annotations

from collections.abc import Iterable

from ktransformer2.tiers.tier import ROOT

_STEPS = 16
_MOST_KNOWN = 2**16  # some 15 MB; forgotten all at once, and learnt again


class Lifetimes:
    """What one process knows of the chains on a server: each block's parent, and what it was renewed to."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_ms = int(ttl_s * 1000)
        self._step_ms = max(1, self._ttl_ms // _STEPS)
        self._parents: dict[bytes, bytes] = {}
        self._renewed_ms: dict[bytes, int] = {}

    def expiry_ms(self, now_ms: int) -> int:
        """The moment until which a use at `now_ms` keeps a block: one to one and a sixteenth times to live away."""
        return -(-(now_ms + self._ttl_ms) // self._step_ms) * self._step_ms

    def learn(self, key: bytes, parent: bytes, *, holds_parent: bool) -> None:
        """A block that does without its parent ends the way to the root."""
        if len(self._parents) >= _MOST_KNOWN:
            self.forget()
        self._parents[key] = parent if holds_parent else ROOT

    def unknown(self, key: bytes) -> bytes:
        """The first block on the way from `key` to the root of which the parent is not known; ROOT: all are.

        Parents are what a server says: where its word goes round in a circle, all of it is forgotten.
        """
        for _ in range(len(self._parents) + 1):
            parent = self._parents.get(key)
            if key == ROOT or parent is None:
                return key
            key = parent
        self.forget()
        return key

    def due(self, keys: Iterable[bytes], expiry_ms: int) -> list[bytes]:
        """What has to be renewed to that moment: `keys` and what is before them. The way to the root is known."""
        due: dict[bytes, None] = {}
        for key in keys:
            way: list[bytes] = []
            while key != ROOT and key not in due and self._renewed_ms.get(key) != expiry_ms:
                if len(way) > len(self._parents):
                    break  # a circle: see `unknown`
                way.append(key)
                key = self._parents.get(key, ROOT)
            due |= dict.fromkeys(reversed(way))
        return list(due)

    def renewed(self, keys: Iterable[bytes], expiry_ms: int) -> None:
        """These expire then."""
        self._renewed_ms |= dict.fromkeys(keys, expiry_ms)

    def forget(self) -> None:
        self._parents.clear()
        self._renewed_ms.clear()
