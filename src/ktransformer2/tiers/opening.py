"""From settings to open tiers, nearest first. The one place that knows which tiers there are.

Invariant: without being asked nothing is opened, made or connected to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from ktransformer2.config import TierConfig
from ktransformer2.tiers.disk import DiskTier
from ktransformer2.tiers.disk_store import DiskLimits
from ktransformer2.tiers.host import HostTier
from ktransformer2.tiers.tier import Lineage, Tier

if TYPE_CHECKING:
    from ktransformer2.tiers.valkey_address import ValkeyAddress

_SEGMENT_BYTES = 256 * 2**20


def asks_for_tiers(config: TierConfig) -> bool:
    """Whether anything below the device is wanted."""
    return config.host_bytes > 0 or outlives_process(config)


def outlives_process(config: TierConfig) -> bool:
    """Whether blocks are to be there for the next process."""
    return config.persist == "on" or _wants_server(config)


def open_tiers(config: TierConfig, lineage: Lineage) -> list[Tier]:
    """The tiers that `config` asks for. `persist` off keeps blocks from everything that outlives the process.

    Raises: ConfigError for a disk on a network, a URL that is none, a key that is missing or too short.
    """
    tiers: list[Tier] = []
    if config.host_bytes:
        tiers.append(HostTier(lineage, config.host_bytes))
    if config.persist == "on":
        tiers.append(DiskTier(disk_directory(config), disk_limits(config), lineage))
    if _wants_server(config):
        from ktransformer2.tiers.valkey import ValkeyTier

        address, key = server_of(config)
        tiers.append(ValkeyTier.open(address, lineage, key))
    return tiers


def server_of(config: TierConfig) -> tuple[ValkeyAddress, bytes]:
    """Where the shared server is, and the deployment's key. Raises: ConfigError."""
    from ktransformer2.tiers.deployment import deployment_key
    from ktransformer2.tiers.valkey_address import ValkeyAddress

    key_file = Path(config.valkey_key_file) if config.valkey_key_file else None
    address = ValkeyAddress(config.valkey_url, ttl_s=config.valkey_ttl_s, bloom_refresh_s=config.bloom_refresh_s)
    return address, deployment_key(key_file)


def disk_directory(config: TierConfig) -> Path:
    """Where blocks lie on disk: as set, else `kv` in KTRANSFORMER_CACHE or the user's cache directory. Not made."""
    if config.disk_directory:
        return Path(config.disk_directory).expanduser()
    named = os.environ.get("KTRANSFORMER_CACHE")
    return (Path(named) if named else Path(platformdirs.user_cache_dir("ktransformer2", appauthor=False))) / "kv"


def disk_limits(config: TierConfig) -> DiskLimits:
    """The bounds of that directory."""
    return DiskLimits(
        config.disk_bytes,
        segment_bytes=max(min(_SEGMENT_BYTES, config.disk_bytes // 8), 1),
        ttl_s=config.disk_ttl_s,
        filter_refresh_s=config.bloom_refresh_s,
    )


def _wants_server(config: TierConfig) -> bool:
    return bool(config.valkey_url) and config.persist != "off"
