"""The exceptions that the engine raises on purpose.

OctavoError
├── InvalidRequestError      the caller's request is wrong: HTTP 400
│   └── ContextLengthError   prompt and max_tokens do not fit the context
├── QueueFullError           as many requests wait as may: HTTP 429
├── EngineDeadError          the engine process is gone or not yet up: HTTP 503
├── ControlRefusedError      the cache cannot do what its operator asks for: HTTP 409
├── RequestFailedError       one accepted request could not be finished: HTTP 500
└── StartupError             octavo cannot start: one line on stderr, exit status 2
    ├── ConfigError          a flag or a combination of flags
    ├── ModelNotFoundError   no such folder, file, hub id or built-in name
    ├── UnsupportedModelError  an architecture, key or tensor type that is not built
    ├── DamagedModelError    the files are there but broken
    └── InsufficientMemoryError  weights or cache do not fit

What is our own bug is an ``assert``; what is merely "not now" is ``None`` or ``False``.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Everything that Octavo raises on purpose."""


class InvalidRequestError(OctavoError, ValueError):
    """A request that no retry can mend. ``param`` names the offending field."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output are longer than the context that is served."""

    code = "context_length_exceeded"


class QueueFullError(OctavoError):
    """So many requests wait that no more are taken now."""


class EngineDeadError(OctavoError):
    """The engine process died or is not ready; requests in flight get this."""


class ControlRefusedError(OctavoError):
    """The cache, as it is now, cannot do what its operator asks for; the message has the numbers."""


class RequestFailedError(OctavoError):
    """One request failed inside the engine; its neighbours are unharmed."""


class StartupError(OctavoError):
    """Octavo cannot start with what it was given."""


class ConfigError(StartupError):
    """A setting is out of range or contradicts another one."""


class ModelNotFoundError(StartupError):
    """Nothing by that name or path."""


class UnsupportedModelError(StartupError):
    """The model asks for something that Octavo does not compute."""


class DamagedModelError(StartupError):
    """A model file is truncated, inconsistent or not what it claims to be."""


class InsufficientMemoryError(StartupError):
    """Weights or the smallest useful cache do not fit in the memory at hand."""
