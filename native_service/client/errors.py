"""How a call of :mod:`native_service.client` can fail. The texts are the server's."""

from __future__ import annotations

from typing import Any, ClassVar

import grpc

from nereid_backend.errors import NereidError


class CallFailed(NereidError):
    """Root of the tree, and what has no class of its own. ``status`` is the canonical gRPC name of what happened."""

    statuses: ClassVar[tuple[str, ...]] = ()

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status or next(iter(self.statuses), self.code)


class BadRequest(CallFailed):
    """The request breaks the model's contract or the server's rules; sent again it fails again."""

    code = "INVALID_ARGUMENT"
    statuses = ("INVALID_ARGUMENT", "OUT_OF_RANGE")


class UnknownModel(CallFailed):
    """The server has no such model."""

    code = "NOT_FOUND"
    statuses = ("NOT_FOUND",)


class TooLarge(CallFailed):
    """The request is over a limit of the server."""

    code = "RESOURCE_EXHAUSTED"
    statuses = ("RESOURCE_EXHAUSTED",)


class ServerFull(CallFailed):
    """The server has no room at the moment; ``retry_after_s`` is when it wants to be asked again."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text, self.code)
        self.retry_after_s = retry_after_s


class NotAllowed(CallFailed):
    """The key is missing or unknown, or its role does not allow the call."""

    code = "PERMISSION_DENIED"
    statuses = ("PERMISSION_DENIED", "UNAUTHENTICATED")


class Unavailable(CallFailed):
    """Nobody answers at the address, or the model is away for the moment."""

    code = "UNAVAILABLE"
    statuses = ("UNAVAILABLE",)


class TimedOut(CallFailed):
    """The caller's time, or the model's, was over."""

    code = "DEADLINE_EXCEEDED"
    statuses = ("DEADLINE_EXCEEDED",)


class CallCancelled(CallFailed):
    """The call was cancelled, by this program or by the server."""

    code = "CANCELLED"
    statuses = ("CANCELLED",)


class ModelFailed(CallFailed):
    """The model could not answer a valid request."""

    statuses = ("INTERNAL", "FAILED_PRECONDITION")


class ProgramFailed(ModelFailed):
    """A program ended with ``exit_code``, -1 for a signal; ``last_lines`` is the end of what it printed."""

    def __init__(self, model: str, exit_code: int, last_lines: tuple[str, ...]) -> None:
        said = f": {last_lines[-1]}" if last_lines else ""
        super().__init__(f"the program of model {model!r} ended with exit code {exit_code}{said}")
        self.exit_code, self.last_lines = exit_code, last_lines


class AnswerBroken(ModelFailed):
    """What the server sent is no whole answer."""


_CLASSES = {
    status: kind
    for kind in (BadRequest, UnknownModel, TooLarge, NotAllowed, Unavailable, TimedOut, CallCancelled, ModelFailed)
    for status in kind.statuses
}


def from_grpc(error: Any, address: str) -> CallFailed:
    """The exception for a ``grpc.RpcError`` of a call to ``address``."""
    status, text = error.code().name, error.details() or "the server gave no reason"
    if status == "UNAVAILABLE" and text.startswith("failed to connect"):
        return Unavailable(f"no server answers at {address}; is it running there? ({text.rpartition(': ')[2]})")
    metadata = (*(error.initial_metadata() or ()), *(error.trailing_metadata() or ()))
    retry_after = next((value for name, value in metadata if name == "retry-after"), "")
    # Only a full server says when to come back; otherwise the request itself is too large.
    if status == grpc.StatusCode.RESOURCE_EXHAUSTED.name and retry_after.isdecimal():
        return ServerFull(text, float(retry_after))
    return _CLASSES.get(status, CallFailed)(text, status)
