"""Why a prompt was not found whole: what differs, what left, what another salt has. Reads; changes nothing.

Names places of tokens, never tokens: whoever asks has the prompt. It does say whether a prompt is known under another
salt, so it is for whoever runs the cache, not for those whom salts keep apart.

One cache holds one plan. So another form means here: the rows lie in a block whose form is taken whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ktransformer2.cache.block import Block, next_key
from ktransformer2.cache.ghosts import Eviction
from ktransformer2.cache.residency import Residency

Reason = Literal["found", "differs", "new", "too short", "form", "evicted", "other salt"]


@dataclass(frozen=True)
class Explanation:
    """What the cache has of a prompt, and why it is not more.

    found       all but the last token, which is always computed
    differs     a text that the cache holds goes on with another token at `position`
    new         nothing that the cache holds begins, or goes on, with the token at `position`
    too short   what is left of the prompt is less than a block, and only whole blocks are found at this precision
    form        what is left lies inside a block that is held in another form than the model's, so only whole
    evicted     it was there and left `evicted_ago_s` ago, `evicted_for` room, share, idle or clear
    other salt  the cache holds more of it, under another salt

    `position`: the place in the prompt of the first token that was not found, or, for `differs`, that differs.
    `tier`: where the block behind what was found lies below the device, as far as filters know; empty: nowhere.
    """

    prompt_tokens: int
    hit_tokens: int
    reason: Reason
    position: int
    evicted_for: str = ""
    evicted_ago_s: float | None = None
    tier: str = ""

    def __str__(self) -> str:
        head = f"{self.hit_tokens:,} of {self.prompt_tokens:,} tokens found"
        return f"{head}; {self._why()}{f'; the {self.tier} tier has what follows' if self.tier else ''}"

    def _why(self) -> str:
        place = f"token {self.position:,}"
        match self.reason:
            case "found":
                return "only the last one is computed, as always"
            case "differs":
                return f"{place} is the first that differs from what the cache holds"
            case "new":
                return f"nothing that the cache holds goes on with {place}"
            case "too short":
                return f"what is left from {place} on is less than a block"
            case "form":
                return f"what is left from {place} on lies inside a quantised block, which is taken whole or not at all"
            case "evicted":
                return f"the block from {place} on left {self.evicted_ago_s or 0:,.0f} s ago, for {self.evicted_for}"
            case "other salt":
                return f"what comes from {place} on is known under another salt only"


@dataclass(frozen=True)
class Lookup:
    """One prompt's way through the index. `data`: all tokens but the last, 4 bytes each.

    `keys`: the hashes of its leading blocks that the cache held at any time; of `complete` of them it has what it
    needs, and of `hit_tokens` tokens in all. `whole_blocks`: parts of a block are not found at this precision.
    """

    prompt_tokens: int
    data: bytes
    root: bytes
    keys: Sequence[bytes]
    complete: int
    hit_tokens: int
    block_tokens: int
    whole_blocks: bool

    @property
    def tail(self) -> bytes:
        """The hash behind the complete blocks."""
        return self.keys[self.complete - 1] if self.complete else self.root

    @property
    def rest(self) -> bytes:
        """The tokens behind the complete blocks."""
        return self.data[4 * self.block_tokens * self.complete :]


def explain(residency: Residency, lookup: Lookup, other_roots: Iterable[bytes], now: float) -> Explanation:
    """`other_roots`: where the hash chains of other salts begin."""
    reason, position, left = _reason(residency, lookup, other_roots)
    if left is None:
        return Explanation(lookup.prompt_tokens, lookup.hit_tokens, reason, position)
    ago_s = now - left.at_s
    return Explanation(lookup.prompt_tokens, lookup.hit_tokens, reason, position, left.cause, ago_s)


def _reason(residency: Residency, lookup: Lookup, other_roots: Iterable[bytes]) -> tuple[Reason, int, Eviction | None]:
    hit = lookup.hit_tokens
    if 4 * hit == len(lookup.data):
        return "found", hit, None
    if lookup.complete < len(lookup.keys):  # held at some time, and not by every layer group now
        return "evicted", hit, residency.ghosts.get(lookup.keys[lookup.complete])
    if any(_tokens_under(root, residency, lookup) > hit for root in other_roots):
        return "other salt", hit, None
    nearest, shared = max((index.longest_child(lookup.tail, lookup.rest) for index in residency.indexes), key=_shared)
    num_left = len(lookup.rest) // 4
    if lookup.whole_blocks and num_left < lookup.block_tokens:
        return "form" if shared == num_left else "too short", hit, None
    position = lookup.complete * lookup.block_tokens + shared
    goes_on = residency.has_child(lookup.tail) if nearest is None else 4 * shared < len(nearest.tokens)
    return "differs" if goes_on else "new", position, None


def _shared(found: tuple[Block | None, int]) -> int:
    return found[1]


def _tokens_under(root: bytes, residency: Residency, lookup: Lookup) -> int:
    """How many tokens of the prompt are known under another salt."""
    step, at, key = 4 * lookup.block_tokens, 0, root
    while at + step <= len(lookup.data):
        following = next_key(key, lookup.data[at : at + step])
        if not residency.was_seen(following):
            break
        key, at = following, at + step
    if lookup.whole_blocks:
        return at // 4
    return at // 4 + max(index.longest_child(key, lookup.data[at:])[1] for index in residency.indexes)
