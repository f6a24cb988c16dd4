"""Export of torch modules: a bundle of StableHLO programs, or a nereid folder with a ``.pt2`` or TorchScript file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from converters.exporters.client_side import PLAIN, ClientSide
from converters.exporters.description import Exported
from converters.exporters.manifest_writer import Layout
from converters.exporters.programs import BATCH_SIZES, Origin, export_programs
from converters.exporters.provenance import Provenance, collect
from converters.exporters.torch_calls import ModuleCall
from converters.exporters.torch_folders import export_file
from converters.exporters.torch_programs import programs_of
from nereid_backend.engines import import_library
from nereid_backend.errors import ExportError

Format = Literal["stablehlo", "pt2", "torchscript"]

_CONVERTER, _PACKAGES = "nereid export_torch", ("torch", "numpy")


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A module on the CPU in evaluation mode, or any function of tensors, with examples of its inputs.

    ``example_inputs`` is one tensor or array, a tuple of positional arguments or a mapping of keyword arguments; each
    may be a tree, in which numbers, flags and None keep their values. Names of inputs are those of the arguments, names
    of outputs the keys of what ``forward`` returns, unless given here. ``axes`` names the axes of a tensor by letters
    in wire order, as in ``{"image": "nchw"}``; ``n`` is the batch, which without an entry is the first axis of an input
    and, in an output, the one that grows with it. ``format`` "stablehlo" makes a bundle, "pt2" and "torchscript" make a
    nereid folder whose file takes up to the largest batch size. For bundles only: ``variants`` are further examples of
    other shapes, each like ``example_inputs``; ``client`` is what clients see instead, and the hooks between.
    """

    module: Callable[..., Any]
    example_inputs: Any
    format: Format = "stablehlo"
    axes: Mapping[str, str] = field(default_factory=dict)
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    variants: Sequence[Any] = ()
    client: ClientSide = PLAIN

    def export(
        self,
        directory: Path | str,
        batch_sizes: Sequence[int] | None = BATCH_SIZES,
        *,
        layout: Layout = "program",
        tolerance: float | None = None,
        provenance: Mapping[str, Any] | None = MappingProxyType({}),
        force: bool = False,
    ) -> Exported:
        """Write this model and run it beside its module: see ``export_torch``."""
        if self.format not in get_args(Format):
            raise ExportError(f"format is {self.format!r}, expected one of {', '.join(get_args(Format))}")
        if self.format == "stablehlo":
            with _written_out_attention(import_library("torch_export")):
                calls = self._calls()
                return export_programs(
                    programs_of(calls, self.axes, batch_sizes),
                    directory,
                    batch_sizes,
                    origin=Origin("torch", _CONVERTER, (*_PACKAGES, "torchax", "jax", "jaxlib"), calls[0].code),
                    axes=self.axes,
                    client=self.client,
                    layout=layout,
                    tolerance=tolerance,
                    provenance=provenance,
                    force=force,
                )
        if self.variants or self.client is not PLAIN or layout != "program":
            raise ExportError(
                f"variants, client and layout are for bundles; leave them out with format={self.format!r}"
            )
        with _written_out_attention(import_library("torch_export"), self.format != "torchscript"):
            return self._export_file(directory, batch_sizes, tolerance, provenance, force)

    def _export_file(
        self,
        directory: Path | str,
        batch_sizes: Sequence[int] | None,
        tolerance: float | None,
        provenance: Mapping[str, Any] | None,
        force: bool,
    ) -> Exported:
        (call,) = self._calls()
        origin = Provenance({})
        if provenance is not None:
            facts = {"source_framework": "torch", "converter": _CONVERTER, "batch_sizes": list(batch_sizes or [])}
            origin = collect(call.code, _PACKAGES, {**facts, **provenance})
        return export_file(
            call, self.format, directory, batch_sizes, axes=self.axes, origin=origin, tolerance=tolerance, force=force
        )

    def _calls(self) -> list[ModuleCall]:
        """The module on the examples and on those of each variant, checked."""
        torch = import_library("torch_export")
        examples = (self.example_inputs, *self.variants)
        calls = [ModuleCall(torch, self.module, each, self.input_names, self.output_names) for each in examples]
        for call in calls:
            call.check()
        return calls


def export_torch(
    module: Callable[..., Any],
    example_inputs: Any,
    directory: Path | str,
    batch_sizes: Sequence[int] | None = BATCH_SIZES,
    *,
    format: Format = "stablehlo",
    axes: Mapping[str, str] = MappingProxyType({}),
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    variants: Sequence[Any] = (),
    client: ClientSide = PLAIN,
    layout: Layout = "program",
    tolerance: float | None = None,
    provenance: Mapping[str, Any] | None = MappingProxyType({}),
    force: bool = False,
) -> Exported:
    """Write ``module`` and run it beside itself at every batch size. See TorchModel for the arguments.

    ``batch_sizes`` None makes one program of exactly the examples' shapes, without a batch axis. ``tolerance`` is for
    floating-point outputs, relative to the largest value (default: 1e-5 for f32, ``comparison.TOLERANCE``). Entries of
    ``provenance`` are added to what is collected; None writes none. Raises BundleError subclasses, EngineMissing, and
    what ``module`` raises; then nothing is written.
    """
    model = TorchModel(module, example_inputs, format, axes, input_names, output_names, variants, client)
    return model.export(directory, batch_sizes, layout=layout, tolerance=tolerance, provenance=provenance, force=force)


@contextmanager
def _written_out_attention(torch: Any, wanted: bool = True) -> Iterator[None]:
    """Without torch's fused attention, which sets what a mask hides to zero: no program made of operators does."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast_path and not wanted)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
