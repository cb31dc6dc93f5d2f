"""What a disk, a lock or SQLite can do to a call, as the kinds that a tier counts. Knows no tier."""

from __future__ import annotations

import errno
import sqlite3

from ktransformer2.errors import ConfigError

FAILURES = (OSError, sqlite3.Error, ConfigError)  # ConfigError: a network's file system came over the directory
_KINDS = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.ENOENT: "gone",
    errno.ETIMEDOUT: "busy",
}
_SQL_KINDS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read_only",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
}


def kind_of(error: Exception, otherwise: str) -> str:
    """full, read_only, gone, busy or index, from what an error says; else `otherwise`, what was being done."""
    if isinstance(error, OSError):
        return _KINDS.get(error.errno or 0, otherwise)
    if isinstance(error, sqlite3.Error):
        return _SQL_KINDS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "index")
    return otherwise


def said(error: Exception) -> str:
    """The reason alone, without number and path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
