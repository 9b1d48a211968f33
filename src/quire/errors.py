"""Every error a user can meet, and the HTTP status it becomes; errors as text for logs and terminals.

QuireError
├── InvalidRequest      400  the request names something impossible; `param` says which field
│   ├── UnknownModel    404
│   └── TooLarge        413
├── Unauthorized        401
├── Overloaded          429  the bounded queue is full; `retry_after` seconds from the backlog
├── Unavailable         503  draining, starting, or the engine process died
├── Closed              503  the LLM of this process has been closed
├── DeadlineExceeded    504
├── InvalidConfig            an option is unknown or cannot work (exit code 2 on the command line)
├── UnknownName              a class of the library has no such attribute
├── InvalidModel             a checkpoint is broken or not supported (exit code 2)
└── StepFailed          500  the executor could not run a step; the engine finds whose fault it was
    └── ExecutorLost         what runs the steps is gone, and every row with it: no request is at fault
        ├── RankLost         it was one of several processes that hold parts of the model
        └── ModelLost        weights that were to be read behind the first answers cannot be
"""

from __future__ import annotations

import difflib
import re
import sys
import traceback
from collections.abc import Iterable


class QuireError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one line, fit to be shown to a user."""

    status = 500
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequest(QuireError):
    """A request that can never be served as it stands."""

    status = 400
    kind = "invalid_request_error"


class UnknownModel(InvalidRequest):
    """The request names a model this server does not serve."""

    status = 404


class TooLarge(InvalidRequest):
    """The request is larger than the server accepts."""

    status = 413


class Unauthorized(QuireError):
    """No API key, or a wrong one."""

    status = 401
    kind = "authentication_error"


class Overloaded(QuireError):
    """The waiting queue is full, or a key has used up what it may. `retry_after` is in seconds."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: float = 1.0, code: str = "queue_full") -> None:
        super().__init__(message, code=code)
        self.retry_after = retry_after


class Unavailable(QuireError):
    """The server cannot answer now, but may soon."""

    status = 503
    kind = "service_unavailable_error"


class Interrupted(Unavailable):
    """An answer stopped in the middle for a reason outside the request. It may be sent again."""


class Closed(QuireError):
    """The LLM has been closed, or its engine is in another process: only a new one can answer."""

    status = 503
    kind = "service_unavailable_error"


class DeadlineExceeded(QuireError):
    """The request's deadline passed before the first token."""

    status = 504
    kind = "timeout_error"


class InvalidConfig(QuireError):
    """An option is unknown, misspelled, or impossible together with another."""

    kind = "invalid_config"


class UnknownName(QuireError, AttributeError):
    """A class has no such attribute; of one that vLLM's has, the message says what there is instead."""


class InvalidModel(QuireError):
    """A checkpoint cannot be loaded, and why."""

    kind = "invalid_model"


class StepFailed(QuireError):
    """A step could not run at all: the engine finds out which request is at fault."""


class ExecutorLost(StepFailed):
    """What runs the steps is gone, and every row with it: the requests on it fail, and none is at fault.

    Which executor, and why, is for the log.
    """

    def for_clients(self) -> str:
        """What the errors of those requests say."""
        return "the executor was lost while this request ran: it may be sent again"


class RankLost(ExecutorLost):
    """One of the processes that hold parts of the model is gone or hangs, so that all have to be started again.

    details: what a library said of it, for the log alone: it may name files and addresses.
    """

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(f"{message}: {details}" if details else message)
        self._public = message

    def for_clients(self) -> str:
        """Which rank it was, and what happened to it."""
        return f"{self._public}: send the request again once the engine has restarted"


class ModelLost(ExecutorLost):
    """Weights that are read behind the first answers could not be: no step can run until all are loaded again."""

    def for_clients(self) -> str:
        """That the model is to be loaded again."""
        return "weights of the model could not be read: send the request again once the model has been loaded anew"


def of(status: int, message: str, *, param: str | None = None) -> QuireError:
    """The error that an engine in another process met, by its status; an unknown one becomes StepFailed."""
    kinds = {kind.status: kind for kind in (InvalidRequest, TooLarge, Interrupted)}
    return kinds.get(status, StepFailed)(message, param=param)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown `name`: ' Did you mean 'x'?' or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def reason(error: OSError) -> str:
    """Why a folder cannot be made or used: of a file that is in its place, not that it exists."""
    return "it is a file, not a folder" if isinstance(error, FileExistsError) else str(error.strerror)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Line breaks, other control characters, and characters that change the direction of text."""


def escape_control(text: str) -> str:
    """The text on one line, with control characters as escape sequences."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def escape_control_lines(text: str) -> str:
    """The lines, escaped and indented, so that none looks like the beginning of a log record."""
    return "\n".join(f"    {escape_control(line)}" for line in text.split("\n"))


def print_traceback() -> None:
    """Print the traceback of the error being handled to standard error, escaped."""
    print(escape_control_lines(traceback.format_exc()), file=sys.stderr, flush=True)
