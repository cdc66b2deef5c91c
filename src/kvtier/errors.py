"""The exceptions of kvtier.

KvtierError
├── ArgumentError (ValueError)       invalid argument
│   ├── RangeError (IndexError)      index, offset or count out of range
│   └── DTypeError (TypeError)       wrong element type
├── NoTokenError (RuntimeError)      no token satisfies all restrictions of a request
├── StateError (RuntimeError)        the object's state does not allow the call
│   └── ClosedError                  the object is closed
├── UnavailableError (RuntimeError)  a feature, package, device or server is not available
├── OutOfMemoryError (MemoryError)   an allocation failed
├── CopyError (RuntimeError)         a copy failed
├── LoadError (RuntimeError)         cached blocks could not be loaded to the device
├── EngineError (RuntimeError)       the engine cannot continue
├── TransferError (RuntimeError)     a transfer of blocks is incomplete
│   ├── CancelledTransferError       the transfer was cancelled
│   └── TransferTimeoutError (TimeoutError)  a transfer or the wait for a transfer timed out
│       └── LayerSwapTimeoutError    the blocks of a layer did not arrive in time
├── StoreError (RuntimeError)        a store could not be opened, listed or closed
│   └── StoreInUseError              another process uses the store and does not share it
├── CheckpointError (ValueError)     a model's files are incomplete, inconsistent or not supported
└── FormatError (ValueError)         stored bytes are invalid: wrong format, truncated or corrupt
    └── VersionError                 the data has a newer format version

A message states the problem. If the relevant numbers and the remedy are known, the message states them too.
"""


class KvtierError(Exception):
    """Base of all exceptions in this module."""


class ArgumentError(KvtierError, ValueError):
    """Invalid argument."""


class RangeError(ArgumentError, IndexError):
    """Index, offset or count out of range."""


class DTypeError(ArgumentError, TypeError):
    """Wrong element type."""


class NoTokenError(KvtierError, RuntimeError):
    """No token satisfies all restrictions of a request."""


class StateError(KvtierError, RuntimeError):
    """The object's state does not allow the call."""


class ClosedError(StateError):
    """The object is closed, or the memory that it borrowed was released."""


class UnavailableError(KvtierError, RuntimeError):
    """The machine or the Python environment lacks a feature, a package or a device, or a server cannot be reached."""


class OutOfMemoryError(KvtierError, MemoryError):
    """An allocation failed."""


class CopyError(KvtierError, RuntimeError):
    """A copy failed. `index` is the position of the failed copy in the caller's batch, if known."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class TransferError(KvtierError, RuntimeError):
    """A transfer of blocks is incomplete. The report of the transfer lists the missing blocks."""


class CancelledTransferError(TransferError):
    """The transfer was cancelled before it was complete."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer or the wait for a transfer timed out."""


class LayerSwapTimeoutError(TransferTimeoutError):
    """The blocks of a layer did not arrive in time."""


class StoreError(KvtierError, RuntimeError):
    """A store could not be opened, listed or closed. Failed reads and writes are reported as results, not raised."""


class StoreInUseError(StoreError):
    """Another process has locked the store's folder and does not share the store with this process.

    The other process may run an earlier version of kvtier, run on another machine, or wait for a disk that hangs.
    """


class CheckpointError(KvtierError, ValueError):
    """A model's files are incomplete or inconsistent, or need a feature that the engine lacks."""


class LoadError(KvtierError, RuntimeError):
    """Cached blocks could not be loaded to the device. The caller should compute the blocks instead."""


class EngineError(KvtierError, RuntimeError):
    """The engine cannot continue, because one of its processes died, failed or does not reply."""


class FormatError(KvtierError, ValueError):
    """Stored bytes are invalid: wrong format, truncated or corrupt."""


class VersionError(FormatError):
    """The data has a newer format version than this build can read."""
