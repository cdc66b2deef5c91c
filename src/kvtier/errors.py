"""Every exception kvtier raises on purpose.

KvtierError
├── ArgumentError (ValueError)       an argument no call could accept
│   ├── RangeError (IndexError)      an index, offset or count outside the thing it addresses
│   ├── AlignmentError               an address or count that does not fall on the boundary it must
│   ├── DTypeError (TypeError)       an element type other than the one required
│   └── PlacementError               memory, a stream or an allocator in the wrong place
├── StateError (RuntimeError)        the object is not in a state that allows the call
│   ├── ClosedError                  used after close()
│   ├── ConstraintError              a constraint cannot say how its answer goes on
│   └── EmptyError                   memory was needed and there is none
├── UnavailableError (RuntimeError)  this machine or environment lacks what was asked for
├── OutOfMemoryError (MemoryError)   an allocator could not serve a request
├── CopyError (RuntimeError)         a copy could not be carried out; names the entry
├── LoadError (RuntimeError)         cached blocks could not be brought to the device
├── EngineError (RuntimeError)       an engine cannot go on: one of its processes died or does not answer
├── TransferError (RuntimeError)     a transfer of blocks did not bring all of them
│   ├── CancelledTransferError       it was cancelled
│   └── TransferTimeoutError (TimeoutError)  it, or one who waits for it, ran out of time
│       └── LayerSwapTimeoutError    a layer's blocks did not arrive in time
├── StoreError (RuntimeError)        a store cannot be opened, or not closed in order
│   └── StoreInUseError              another process has it open
├── CheckpointError (ValueError)     a model's files are missing something or contradict each other
│   └── UnsupportedModelError        an architecture or feature the engine does not compute
└── FormatError (ValueError)         stored bytes that are not a record of ours
    ├── TruncatedError               fewer bytes than the record says
    ├── VersionError                 written by a newer format than this build reads
    └── ChecksumError                the bytes are not those that were saved

A message says what was asked, the numbers, why it cannot be, and what to do instead.
"""


class KvtierError(Exception):
    """Base of every exception raised by kvtier."""


class ArgumentError(KvtierError, ValueError):
    """An argument that no call could accept."""


class RangeError(ArgumentError, IndexError):
    """An index, offset or count outside the thing it addresses."""


class AlignmentError(ArgumentError):
    """An address, offset or count that does not fall on the boundary it must."""


class DTypeError(ArgumentError, TypeError):
    """An element type other than the one required."""


class PlacementError(ArgumentError):
    """Memory, a stream or an allocator is in another place than the call needs."""


class StateError(KvtierError, RuntimeError):
    """The object is not in a state that allows this call."""


class ConstraintError(StateError):
    """A constraint cannot say how its answer goes on, which ends. The message quotes nothing of it: it is logged."""


class ClosedError(StateError):
    """The object was closed, or the memory it borrowed is gone."""


class EmptyError(StateError):
    """Memory was needed and this Buffer refers to none."""


class UnavailableError(KvtierError, RuntimeError):
    """This machine or this Python environment lacks what was asked for."""


class OutOfMemoryError(KvtierError, MemoryError):
    """An allocator could not serve a request."""


class CopyError(KvtierError, RuntimeError):
    """A copy could not be carried out. `index` is the caller's entry, where it is known."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class TransferError(KvtierError, RuntimeError):
    """A transfer of blocks did not bring all of them; its report says which."""


class CancelledTransferError(TransferError):
    """The transfer was cancelled before it was complete."""


class TransferTimeoutError(TransferError, TimeoutError):
    """A transfer, or one who waits for it, ran out of time."""


class LayerSwapTimeoutError(TransferTimeoutError):
    """The blocks of a layer did not arrive in time."""


class StoreError(KvtierError, RuntimeError):
    """A store cannot be opened, or not closed in order. What goes wrong in between is an outcome, not an exception."""


class StoreInUseError(StoreError):
    """Another process, or another store of this one, has the folder open."""


class CheckpointError(KvtierError, ValueError):
    """A model's files are missing something, or contradict each other."""


class UnsupportedModelError(CheckpointError):
    """A sound checkpoint of an architecture, or with a feature, that the engine does not compute."""


class LoadError(KvtierError, RuntimeError):
    """Cached blocks could not be brought to the device; they are computed instead."""


class EngineError(KvtierError, RuntimeError):
    """An engine cannot go on: one of its processes died, or does not answer."""


class FormatError(KvtierError, ValueError):
    """Stored bytes that are not a record of ours."""


class TruncatedError(FormatError):
    """Fewer bytes than the record says it has."""


class VersionError(FormatError):
    """Written by a newer format than this build reads."""


class ChecksumError(FormatError):
    """The bytes read are not the bytes that were saved."""
