"""What a replacement policy is told and what it is asked. Keys and sizes only: no tensors, no I/O, no clock of its own.

`Retention` owns the entries and calls a policy; who may not leave (in use, pinned, somebody's parent) is its business.
A policy keeps the candidates in an order of its own and remembers what it likes of keys that have left.

    admit -> offer -> use -> offer -> ... -> forget
               |
               +-- set_aside (something still rests on it) -> back (nothing does any more), or use

Every call is O(1), amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

Key = int | bytes  # bytes: evenly spread, such as a hash
Clock = Callable[[], float]
_GOLDEN = 0x9E3779B97F4A7C15


class Entry:
    """One cached block as replacement sees it. Made and kept by `Retention`; a policy reads it.

    `parent`: the key before it. `children`: entries that hold it as their parent. `hits`: uses after the first. `turn`:
    how many times the text up to here had been taken up again when the block came (0: nothing before it was known).
    `used_at`: when its last user let go. `users`: sequences and pins that hold it. `aside`: taken out of the order
    because it cannot leave. `over`: its callers say that it will not be used again. `session`: an evenly spread number
    of the key where its text left what many share, a stand-in for its conversation. `queue` and `note` are a policy's
    own marks, `band` that of `Bands`.
    """

    __slots__ = (
        "aside",
        "band",
        "children",
        "full",
        "hits",
        "holds_parent",
        "key",
        "note",
        "num_bytes",
        "over",
        "parent",
        "queue",
        "session",
        "turn",
        "used_at",
        "users",
    )

    session: int  # set by whoever makes the entry
    used_at: float  # from its first offer on

    def __init__(self, key: Key, parent: Key | None, num_bytes: int, full: bool) -> None:
        self.key = key
        self.parent = parent
        self.num_bytes = num_bytes
        self.full = full
        self.holds_parent = True
        self.users = 1
        self.aside = self.over = False
        self.children = self.hits = self.turn = self.band = self.queue = self.note = 0

    def __repr__(self) -> str:
        return f"Entry({self.key!r}, users={self.users}, hits={self.hits}, turn={self.turn})"


class ReplacementPolicy(Protocol):
    """The order in which candidates leave.

    A policy that `weighs_hints` is told by `demote` when an entry becomes `over`, and judges for itself what that is
    worth; for others `Bands` lets such entries go first.
    """

    weighs_hints: bool

    def admit(self, entry: Entry) -> None:
        """A block came; its first user still holds it, so it is no candidate yet."""

    def use(self, entry: Entry) -> None:
        """A candidate, or one set aside, was found and is held now: no candidate until it is offered again."""

    def offer(self, entry: Entry) -> None:
        """The last user let go: a candidate, used just now."""

    def set_aside(self, entry: Entry) -> None:
        """No candidate until `offer` or `back`; not a use."""

    def back(self, entry: Entry) -> None:
        """What rested on it has left, and nobody used it meanwhile: a candidate again, among the first to go."""

    def pick(self) -> Entry | None:
        """The candidate that goes next, left in place. None: there is none."""

    def forget(self, entry: Entry, evicted: bool) -> None:
        """The candidate, or one set aside, is gone. Only an evicted key may be remembered."""

    def demote(self, entry: Entry) -> None:
        """The candidate has become `over`. Never called where `weighs_hints` is False."""

    def check_integrity(self, candidates: Iterable[Entry]) -> None:
        """Recount: the order holds exactly `candidates`; an assertion names what differs. O(entries)."""


def spread(key: Key) -> int:
    """An evenly spread number of 32 bits."""
    return key * _GOLDEN % 2**64 >> 32 if isinstance(key, int) else int.from_bytes(key[:4], "little")


class HintsUnread:
    """For policies that leave hints to `Bands`."""

    weighs_hints = False

    def demote(self, entry: Entry) -> None:
        raise AssertionError(f"{type(self).__name__} does not weigh hints")


class Queue(OrderedDict[Entry, None]):
    """Entries in an order, each once."""

    def append(self, entry: Entry) -> None:
        self[entry] = None

    def put_first(self, entry: Entry) -> None:
        self[entry] = None
        self.move_to_end(entry, last=False)

    def discard(self, entry: Entry) -> None:
        self.pop(entry, None)

    def first(self) -> Entry | None:
        return next(iter(self), None)
