"""The one error tree of the project.

A class knows the canonical gRPC code by *name*; each process edge translates that name once
(:mod:`nereid_backend.model` to a ``TritonError``, the service to a gRPC status, the commands to
an exit code). The text is short and safe to show to a client: it names the object, the rule, what
was expected, what was found and what to do, and never a server path or a traceback of the runtime.
"""

from __future__ import annotations

import re
import reprlib
from typing import Any, ClassVar


def short_repr(value: Any) -> str:
    """``repr`` for a message, at most 60 characters: YAML aliases can make a small file print gigabytes."""
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# Whoever gets a model's error as a text only, or with Triton's codes only, asks with this request parameter for the
# code before the text.
CODE_IN_TEXT = "nereid_code_in_text"
_CODED = re.compile(r"\[([A-Z_]+)\] ")


def split_code(text: str) -> tuple[str, str] | None:
    """The code and the text of an error that was asked for with ``CODE_IN_TEXT``; None for any other."""
    match = _CODED.search(text)  # an ensemble puts its own name before it
    return (match[1], text[: match.start()] + text[match.end() :]) if match else None


class NereidError(Exception):
    """Root of the tree. ``code`` is a canonical gRPC status name."""

    code: ClassVar[str] = "INTERNAL"


# What a caller did.


class InvalidArgument(NereidError):
    """A request that breaks the model's contract."""

    code = "INVALID_ARGUMENT"


class NotFound(NereidError):
    """A model or version nobody serves."""

    code = "NOT_FOUND"


class AlreadyExists(NereidError):
    """Something of that name is there, and is not to be replaced."""

    code = "ALREADY_EXISTS"


class ResourceExhausted(NereidError):
    """A limit of this server was reached; the same call may succeed later, in ``retry_after_s`` where that is known."""

    code = "RESOURCE_EXHAUSTED"

    def __init__(self, text: str, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class OverLimit(NereidError):
    """A request larger than this server takes; sending it again does not help."""

    code = "RESOURCE_EXHAUSTED"


class NotOffered(NereidError):
    """A call that this server does not answer, or not by its settings."""

    code = "UNIMPLEMENTED"


class DeadlineExceeded(NereidError):
    """The client stops waiting before its call can be handed on."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(NereidError):
    """The client no longer waits: it cancelled, or its deadline has passed."""

    code = "CANCELLED"


# What a bundle or a folder on disk is.


class BundleError(NereidError):
    """A model on disk cannot be converted as it is."""

    code = "FAILED_PRECONDITION"


class ManifestError(BundleError):
    """manifest.yaml breaks a rule of the bundle format."""


class ContractError(BundleError):
    """model_inference.textproto breaks a rule of the nereid folder contract."""


class TritonConfigError(BundleError):
    """config.pbtxt of somebody's Triton model breaks a rule, or asks for what is not taken over."""


class SignatureError(BundleError):
    """A compiled program does not take or give what the manifest and the weights say."""


class WeightsError(BundleError):
    """A safetensors file is damaged or does not fit the bundle."""


class UserCodeError(BundleError):
    """The Python file of a bundle cannot be loaded or does not say what it runs."""


class ConversionKilled(BundleError):
    """Somebody killed a conversion (the kernel for its memory, an operator): that says nothing about the model."""


class RecordError(BundleError):
    """A mapping read from a file has other keys or values than its record."""


class SpecError(BundleError):
    """nereid.json is not a model specification this version can read."""


class ExportError(BundleError):
    """A model in memory cannot be written as a bundle that gives what the model gives."""


class RepositoryError(BundleError):
    """The Triton model repository cannot be written as asked."""


class ReportError(BundleError):
    """The report of a conversion cannot be read or written."""


# What this machine offers.


class EngineMissing(NereidError):
    """The library of an engine is not installed in this interpreter."""

    code = "FAILED_PRECONDITION"


class DeviceMissing(NereidError):
    """The device a model asks for is not there."""

    code = "FAILED_PRECONDITION"


class SettingsError(NereidError):
    """nereid.yaml or a command line breaks a rule."""

    code = "FAILED_PRECONDITION"


class TritonUnavailable(NereidError):
    """No tritonserver can be found, fetched, started or reached."""

    code = "UNAVAILABLE"


class EnvoyUnavailable(NereidError):
    """No Envoy can be found or started."""

    code = "UNAVAILABLE"


class ServerUnavailable(NereidError):
    """No running `nereid serve` is found, or it does not answer."""

    code = "UNAVAILABLE"


class ModelLoadError(NereidError):
    """Triton could not load a model, or did not within its deadline."""

    code = "FAILED_PRECONDITION"


# What went wrong while computing.


class ModelUnavailable(NereidError):
    """A model that should answer is not there at the moment."""

    code = "UNAVAILABLE"


class ModelLoading(ModelUnavailable):
    """A model that is being loaded was not there in the time that the call had."""


class Unplanned(NereidError):
    """A bug, which the log tells with its traceback."""


class CallError(NereidError):
    """The code of a meta model calls what it may not, or when it may not."""


class HookError(NereidError):
    """A hook of the bundle failed on a request."""


class EngineError(NereidError):
    """The executable failed on valid input."""


class OutputError(NereidError):
    """The executable gave something else than its specification says."""


class OutputRefused(NereidError):
    """A program left no tensor, or one that the call it was made for cannot carry."""

    code = "FAILED_PRECONDITION"


class TimeLimitExceeded(NereidError):
    """A program ran longer than its folder allows, or a call took longer than the settings do."""

    code = "DEADLINE_EXCEEDED"
