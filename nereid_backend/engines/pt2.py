"""torch's .pt2 archives: ExportedPrograms and AOTInductor packages.

Opening either runs what the file holds: torch.export's reader unpickles and evaluates expressions, an AOTInductor
package is a shared library. The converter asks for consent first.
"""

from __future__ import annotations

import json
import os
import platform
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nereid_backend.engines.torch_engine import TorchEngine, last_line
from nereid_backend.errors import DeviceMissing, SignatureError

# AOTI_CPU_ISA's words -> the flags Linux lists for a processor that has them.
_ISA_FLAGS = {"AVX2": "avx2", "AVX512": "avx512f", "AVX512_VNNI": "avx512_vnni", "AMX_TILE": "amx_tile"}


class ExportedProgramEngine(TorchEngine):
    """The module of a torch.export program; inputs in the order of its flattened arguments."""

    name = "torch_export"
    what = "the exported program"

    @classmethod
    def open(cls, torch: Any, path: Path, device: Any) -> Callable[..., Any]:
        program = load_program(torch, path)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        return flat_call(program)

    @classmethod
    def is_callers_fault(cls, error: Exception) -> bool:
        return isinstance(error, AssertionError)  # a guard on the sizes it was exported for


class AotInductorEngine(TorchEngine):
    """A compiled package; inputs in the order of its flattened arguments."""

    name = "aotinductor"
    what = "the AOTInductor package"

    @classmethod
    def open(cls, torch: Any, path: Path, device: Any) -> Callable[..., Any]:
        check_machine(path, device.type)
        # The package's own checks of dtypes and sizes are off by default, and then a wrong size is a wrong answer.
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        try:
            # A package given no index takes the current device.
            index = -1 if device.index is None else device.index
            package = torch._inductor.aoti_load_package(str(path), device_index=index)
        except (RuntimeError, ValueError, OSError, KeyError, IndexError) as error:
            raise SignatureError(
                f"{path.name}: is not an AOTInductor package that torch {torch.__version__} can load "
                f"({last_line(error)}); compile it with this torch"
            ) from error
        run: Callable[[list[Any]], list[Any]] = package.loader.run
        return lambda *tensors: run(list(tensors))

    @classmethod
    def is_callers_fault(cls, error: Exception) -> bool:
        return str(error).lstrip().startswith("input_handles[")


def load_program(torch: Any, path: Path) -> Any:
    """The ExportedProgram in ``path``. Raises SignatureError. Runs code from the file."""
    try:
        return torch.export.load(str(path))
    # Its reader raises whatever the damaged part of the file provokes.
    except Exception as error:
        raise SignatureError(
            f"{path.name}: is not a program that torch {torch.__version__} can load ({last_line(error)}); export it "
            "with torch.export.save"
        ) from error


def flat_call(program: Any) -> Callable[..., list[Any]]:
    """``program`` as a function of its flattened tensors, in the order of ``graph_signature``."""
    from torch.utils import _pytree as pytree

    module, in_spec = program.module(), program.call_spec.in_spec

    def call(*tensors: Any) -> list[Any]:
        arguments, keywords = pytree.tree_unflatten(tensors, in_spec)
        leaves: list[Any] = pytree.tree_leaves(module(*arguments, **keywords))
        return leaves

    return call


def check_machine(path: Path, device: str) -> None:
    """Raise DeviceMissing or SignatureError unless this machine can run the package: it would crash, not complain."""
    built = compiled_for(path)
    if built.get("AOTI_DEVICE_KEY", device) != device:
        raise DeviceMissing(f"{path.name} was compiled for {built['AOTI_DEVICE_KEY']}, the model's device is {device}")
    machine = built.get("AOTI_MACHINE", platform.machine())
    if machine != platform.machine():
        raise DeviceMissing(f"{path.name} was compiled for {machine}, this machine is {platform.machine()}")
    has = _processor_flags()
    needed = [word for word in built.get("AOTI_CPU_ISA", "").split() if word in _ISA_FLAGS]
    if has and (missing := [word for word in needed if _ISA_FLAGS[word] not in has]):
        raise DeviceMissing(
            f"{path.name} was compiled for a processor with {' and '.join(missing)}, which this one lacks; compile it "
            "here"
        )


def compiled_for(path: Path) -> dict[str, str]:
    """What an AOTInductor package says about the machine it was compiled for. Raises SignatureError."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {}
            for name in archive.namelist():
                if "/data/aotinductor/" in name and name.endswith("_metadata.json"):
                    found.update(json.loads(archive.read(name)))
            return {str(key): str(value) for key, value in found.items()}
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise SignatureError(f"{path.name}: is a damaged .pt2 archive ({error}); compile it again") from None


def _processor_flags() -> set[str]:
    """Lower-case feature flags of the processor; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith("flags") for flag in line.partition(":")[2].split()}
