"""What a person needs out of Triton's error texts."""

from __future__ import annotations

import re

import grpc

from native_service.envoy.scripts import GONE, PROCESS_DIED, STUB_IS_DEAD
from nereid_backend.errors import NereidError, split_code

LOADED_AGAIN = "the model is being loaded again, retry later"

_LONGEST = 500
# load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: EngineMissing: ...\n\nAt:\n  /path(3): f\n;
_LOAD_FAILED = re.compile(r"is at UNAVAILABLE state: (?:[A-Z][A-Za-z ]*: )?(.*)", re.DOTALL)
_DEAD_STUB = re.compile(r"Stub process '[^']*' is not healthy")
# gRPC's own words for a call that did not get to Triton, or was on its way when it died: they name our sockets.
_NO_ANSWER = re.compile(
    r"failed to connect to all addresses|Socket closed|Stream removed|recvmsg|\b(?:unix|ipv[46]):\S"
)
# What is not served is refused before: a call that took its time until here meets a Triton that has just started.
_NOT_LOADED = re.compile(r"^Request for unknown model: '[^']*' (?:is not found|has no available versions)")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|bad_alloc|MemoryError|cannot allocate memory|cuda failure 2\b|failed to allocate memory"
    r"|RESOURCE_EXHAUSTED",
    re.IGNORECASE,
)
_TRACEBACK = re.compile(r"\n\s*\nAt:\n.*|\nTraceback \(most recent call last\):.*?(?=\n\S)", re.DOTALL)
# A blank belongs to a path inside of it, where a slash comes later in the same words; a name of one part is none.
_PATH = re.compile(r"(?<![\w./])(?:/[\w.+@-]+(?: [\w.+@-]+)*?)+/([\w.+@-]+)")


def load_failure(text: str) -> str:
    """The reason in a failed load's text: the last exception line, with no traceback and no server paths."""
    match = _LOAD_FAILED.search(text)
    reason = _TRACEBACK.sub("", match[1] if match else text)
    if _DEAD_STUB.search(reason):
        return "its process ended while it was starting; its last words are in the log above"
    lines = [line.strip().rstrip(";").strip() for line in reason.splitlines()]
    return without_paths(" ".join(line for line in lines if line))[:_LONGEST] or "Triton gave no reason"


def is_out_of_memory(text: str) -> bool:
    """Whether the reason of a failed load is that memory did not suffice, in the words of the engines."""
    return bool(_OUT_OF_MEMORY.search(text))


def _canonical(code: str, text: str) -> tuple[str, str]:
    """The name of the code and the text that an error of a model is meant to have; Triton lacks some codes."""
    told = split_code(text)
    return told if told and told[0] in grpc.StatusCode.__members__ else (code, text)


def status_of(error: NereidError | grpc.aio.AioRpcError) -> tuple[str, str]:
    """The name of the gRPC status and the whole text of an error that ends a call."""
    if isinstance(error, NereidError):
        return error.code, str(error)
    # Triton's own code and words: the runtime inside has made them fit for a client.
    text = error.details() or "Triton gave no reason"
    if STUB_IS_DEAD in text:
        return "UNAVAILABLE", PROCESS_DIED
    if error.code() is grpc.StatusCode.UNAVAILABLE and _NO_ANSWER.search(text):
        return "UNAVAILABLE", GONE
    if _NOT_LOADED.search(text):
        return "UNAVAILABLE", LOADED_AGAIN
    return _canonical(error.code().name, text)


def without_paths(text: str) -> str:
    """``text`` with every absolute path cut down to its last part."""
    return _PATH.sub(r"\1", text)
