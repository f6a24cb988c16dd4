"""Ensembles of Triton, as meta models: their steps are called in turn and hand tensors on by name.

Triton's own ensemble would need each step's configuration to stay word by word what it was. The code that is written is
made of names only; none of it comes from the repository.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from converters import durable, meta
from converters.prepared import Prepared
from converters.triton_config import Configured, ConfiguredTensor, Step
from nereid_backend.errors import TritonConfigError
from nereid_backend.spec import VARIABLE, ModelSpec, TensorSpec
from nereid_backend.user_code import USER_CODE

STEPS_NOTE = (
    "the ensemble becomes a meta model that calls its steps in turn; nereid serve hides them from clients unless "
    "nereid.yaml names them"
)
_CODE = '''"""The steps of the ensemble: model, its inputs and its outputs by the tensors between the steps."""

from nereid_backend.hooks import register_meta_model

STEPS = {steps!r}
OUTPUTS = {outputs!r}


def run(inputs, call):
    tensors = dict(inputs)
    for model, takes, gives in STEPS:
        answer = call(model, {{name: tensors[tensor] for name, tensor in takes.items()}}, [*gives])
        tensors.update((gives[name], array) for name, array in answer)
    return {{name: tensors[name] for name in OUTPUTS}}


register_meta_model(run=run)
'''


def read(name: str, configured: Configured, callees: Mapping[str, ModelSpec]) -> Prepared:
    """The meta model ``name`` that does what an ensemble of ``callees`` does. Raises BundleError subclasses."""
    inputs, outputs = (_on_the_wire(t, configured.max_batch_size) for t in (configured.inputs, configured.outputs))
    if not inputs or not outputs:
        raise TritonConfigError("an ensemble must declare its inputs and outputs; add them to config.pbtxt")
    calls = {step.model: meta.contract_of(step.model, name, callees) for step in configured.steps}
    tensors = {tensor.name: tensor for tensor in inputs}
    steps = _in_order(configured.steps, tensors)
    for step in steps:
        _hand_over(step, calls[step.model], tensors)
    for output in outputs:
        if output.name not in tensors:
            raise TritonConfigError(f"no step gives the ensemble's output {output.name!r}; correct the output_maps")
        _check_same(output.name, output, tensors[output.name], "the ensemble declares")
    spec = ModelSpec(
        name=name,
        engine=meta.ENGINE,
        platform=meta.PLATFORM,
        inputs=inputs,
        outputs=outputs,
        programs=(),
        instances=meta.DEFAULT_CONCURRENCY,
        calls=tuple(calls.values()),
    )
    code = _CODE.format(
        steps=[(step.model, dict(step.takes), dict(step.gives)) for step in steps],
        outputs=[tensor.name for tensor in outputs],
    )
    taken_over = [f"{len(steps)} steps: {', '.join(step.model for step in steps)}"]
    return Prepared(
        spec,
        {USER_CODE: lambda target: durable.write_text(target, code)},
        (STEPS_NOTE, *configured.changed),
        taken_over=tuple(taken_over),
    )


def _on_the_wire(tensors: Sequence[ConfiguredTensor], limit: int) -> tuple[TensorSpec, ...]:
    """What clients send and get; rows are one more variable axis to a meta model."""
    if reshaped := [tensor.name for tensor in tensors if tensor.shape != tensor.dims]:
        raise TritonConfigError(f"{reshaped[0]!r} of an ensemble is reshaped; move the reshape to the step's model")
    return tuple(TensorSpec(t.name, t.dtype, (VARIABLE, *t.dims) if limit else t.dims) for t in tensors)


def _in_order(steps: Sequence[Step], given: Mapping[str, TensorSpec]) -> list[Step]:
    """The steps so that each comes after those whose tensors it takes. Raises TritonConfigError."""
    there, waiting, ordered = {*given}, [*steps], list[Step]()
    while waiting:
        ready = [step for step in waiting if there.issuperset(step.takes.values())]
        if not ready:
            missing = next(tensor for tensor in waiting[0].takes.values() if tensor not in there)
            raise TritonConfigError(
                f"the step {waiting[0].model!r} waits for {missing!r}, which no step before it gives; correct the maps"
            )
        ordered += ready
        waiting = [step for step in waiting if step not in ready]
        there.update(tensor for step in ready for tensor in step.gives.values())
    return ordered


def _hand_over(step: Step, callee: ModelSpec, tensors: dict[str, TensorSpec]) -> None:
    """Check what a step takes and add what it gives to ``tensors``. Raises TritonConfigError."""
    wanted, made = ({t.name: t for t in side} for side in (callee.inputs, callee.outputs))
    if step.takes.keys() != wanted.keys():
        raise TritonConfigError(
            f"the step {step.model!r} maps the inputs {sorted(step.takes)}, the model takes {sorted(wanted)}; correct "
            "input_map"
        )
    for name, tensor in step.takes.items():
        _check_same(tensor, tensors[tensor], wanted[name], f"{step.model!r} takes")
    for name, tensor in step.gives.items():
        if name not in made or tensor in tensors:
            problem = "the model does not give" if name not in made else f"gives {tensor!r}, which is there already, by"
            raise TritonConfigError(f"the step {step.model!r}: {problem} {name!r}; correct output_map")
        tensors[tensor] = made[name]


def _check_same(name: str, left: TensorSpec, right: TensorSpec, who: str) -> None:
    sizes = zip(left.shape, right.shape, strict=False)
    fits = len(left.shape) == len(right.shape) and all(VARIABLE in (a, b) or a == b for a, b in sizes)
    if left.dtype != right.dtype or not fits:
        raise TritonConfigError(
            f"the tensor {name!r} is {left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)}: {who} it "
            "otherwise; correct the ensemble or the step's model"
        )
