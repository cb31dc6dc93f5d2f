"""Every error a caller can meet, as one tree.

    KTransformerError
    ├── ConfigError            a setting is wrong (also a ValueError)
    ├── RequestError           one request is wrong (also a ValueError)
    │   ├── EmptyPromptError
    │   └── ContextLengthError the prompt is longer than the model or the memory can hold
    ├── ModelError             a model cannot be loaded or served
    │   ├── ModelNotFoundError
    │   ├── NotReachableError  it lies behind a network that does not answer
    │   ├── ModelFileError     a weight file is broken or truncated
    │   └── UnsupportedModelError
    ├── OutOfMemoryError       the memory limit cannot hold what was asked (also a MemoryError)
    ├── NumericsError          the model produced NaN or infinite logits
    ├── OwnershipError         a second thread, or a child after fork, touched the cache
    ├── QueueFullError         the bounded queue has no place
    ├── EngineClosedError      used after close()
    └── NoServerError          no server answers where one was asked

A message says what, what was got, what is allowed, and what to do. Running short of room inside a step is
never an exception: `KVCache.allocate` returns False and the scheduler waits or preempts.
"""

from __future__ import annotations


class KTransformerError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(KTransformerError, ValueError):
    """A setting is unknown, out of range, or contradicts another."""


class RequestError(KTransformerError, ValueError):
    """One request cannot be served as it was asked; others are not affected."""


class EmptyPromptError(RequestError):
    """The prompt holds no token."""


class ContextLengthError(RequestError):
    """The prompt and its reserve for the answer are longer than the context; nothing was truncated."""


class ModelError(KTransformerError):
    """A model cannot be loaded or served."""


class ModelNotFoundError(ModelError):
    """No folder, file, or hub repository of that name."""


class NotReachableError(ModelError):
    """The model is not on this machine, and what has it does not answer."""


class ModelFileError(ModelError):
    """A weight file is broken, truncated, or not what it says it is."""


class UnsupportedModelError(ModelError):
    """The architecture needs something that this package does not serve; the message names it."""


class OutOfMemoryError(KTransformerError, MemoryError):
    """The memory limit cannot hold the request; the message says need, have, and the longest that fits."""


class NumericsError(KTransformerError):
    """The model produced NaN or infinite logits; the request is ended and its blocks are not published."""


class OwnershipError(KTransformerError, RuntimeError):
    """The cache was used from a second thread, or from a child process after fork."""


class QueueFullError(KTransformerError):
    """The bounded request queue is full."""


class EngineClosedError(KTransformerError, RuntimeError):
    """The engine was closed."""


class NoServerError(KTransformerError):
    """No server answers at that address; the message says how to start one."""
