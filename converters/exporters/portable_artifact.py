"""StableHLO programs in the form that bundles store: portable artifacts that readers twelve weeks older take."""

from __future__ import annotations

import re

from nereid_backend.engines import import_library

_HEADER = re.compile(rb"ML\xefR.{0,8}?StableHLO_v(\d+)\.(\d+)\.(\d+)", re.DOTALL)


NEWER = (
    "a program calls the host's libraries (as linear algebra does) in a way that StableHLO of twelve weeks ago has no "
    "words for; readers must be as new as this jax"
)


def for_older_readers(module: bytes) -> bytes | None:
    """``module`` (portable artifact, MLIR bytecode or text) as an artifact of the StableHLO of twelve weeks ago.

    None when that cannot say it. What is older already stays as it is, and so does what is no StableHLO: the reader of
    bundles tells what is wrong with it. Raises EngineMissing without jax.
    """
    import_library("stablehlo")
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    target = stablehlo.get_version_from_compatibility_requirement(stablehlo.StablehloCompatibilityRequirement.WEEK_12)
    header = _HEADER.match(module)
    if header and tuple(map(int, header.groups())) <= tuple(map(int, target.split("."))):
        return module
    with mlir.make_ir_context() as context:
        context.attach_diagnostic_handler(lambda _: True)  # else MLIR prints what None says here
        try:
            parsed = stablehlo.deserialize_portable_artifact(context, module) if header else ir.Module.parse(module)
        except (ValueError, UnicodeDecodeError, ir.MLIRError):
            return module
        try:
            written: bytes = stablehlo.serialize_portable_artifact(parsed, target)
        except ValueError:
            return None
    return written
