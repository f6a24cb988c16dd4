"""A model whose hooks run in processes of their own: an ensemble of preprocess, executable and postprocess.

Triton batches only tensors that all carry the batch. Where a client's tensors do not (one query for many keys, a result
of free length), the executable becomes a model of its own behind the hooks, which batches what they make of several
requests; the ensemble ties the three together inside Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from converters.prepared import Prepared
from nereid_backend.spec import POSTPROCESS, PREPROCESS, BuiltinSpec, Hooks, ModelSpec, TensorSpec

CORE = "core"
DEFAULT_PROCESSES = 2


def names(model: str) -> tuple[str, str, str]:
    """Triton's names of the stages of ``model``, in the order they run."""
    return f"{model}__{PREPROCESS}", f"{model}__{CORE}", f"{model}__{POSTPROCESS}"


def split(prepared: Prepared, processes: int = DEFAULT_PROCESSES) -> Prepared:
    """``prepared``, a model with hooks, as an ensemble; each side's hooks get ``processes`` processes."""
    spec, hooks = prepared.spec, prepared.spec.hooks
    if hooks is None:
        return prepared
    before, middle, after = names(spec.name)
    core = replace(spec, name=middle, hooks=None)
    entering, leaving = _unbatched(spec.inputs), _unbatched(spec.outputs)
    preprocess = replace(
        hooks,
        client_inputs=_unbatched(hooks.client_inputs),
        client_outputs=_as_sent(core, spec.inputs),
        postprocess=_columns("add_column", core, spec.inputs),
        code=tuple(side for side in hooks.code if side == PREPROCESS),
    )
    postprocess = replace(
        hooks,
        client_inputs=_as_sent(core, spec.outputs),
        client_outputs=_unbatched(hooks.client_outputs),
        preprocess=_columns("drop_column", core, spec.outputs),
        code=tuple(side for side in hooks.code if side == POSTPROCESS),
    )
    stages = (
        _hooks_only(spec, before, entering, preprocess, processes),
        core,
        _hooks_only(spec, after, leaving, postprocess, processes),
    )
    artifacts = {file: source for file, source in prepared.files.items() if file in spec.artifacts}
    others = {file: source for file, source in prepared.files.items() if file not in spec.artifacts}
    return Prepared(
        replace(spec, max_batch_size=0, stages=tuple(stage.contract for stage in stages)),
        {},
        prepared.notes,
        (Prepared(stages[0], others), Prepared(core, artifacts), Prepared(stages[2], others)),
    )


def _hooks_only(spec: ModelSpec, name: str, tensors: tuple[TensorSpec, ...], hooks: Hooks, processes: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        engine="identity",
        platform=spec.platform,
        inputs=tensors,
        outputs=tensors,
        programs=(),
        instances=processes,
        hooks=hooks,
    )


def _unbatched(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same without a batch axis: that axis is just variable where nothing is batched."""
    return tuple(replace(tensor, batch_axis=None) for tensor in tensors)


def _as_sent(core: ModelSpec, tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """``tensors`` of the executable as Triton carries them to and from ``core``: one number per row is a column."""
    columns = [bool(core.max_batch_size) and core.is_scalar(tensor) for tensor in tensors]
    return tuple(
        replace(tensor, shape=(*tensor.shape, 1)) if column else tensor
        for tensor, column in zip(_unbatched(tensors), columns, strict=True)
    )


def _columns(builtin: str, core: ModelSpec, tensors: Sequence[TensorSpec]) -> tuple[BuiltinSpec, ...]:
    scalars = [tensor.name for tensor in tensors if core.max_batch_size and core.is_scalar(tensor)]
    return (BuiltinSpec(builtin, {"names": scalars}),) if scalars else ()
