"""Triton's own limit on a model's queue, for repositories that a plain tritonserver serves.

``nereid serve`` needs none: there a model's permits are Envoy's. Facts are of Triton 2.51 (``spec/triton.md`` 1.4).
"""

from __future__ import annotations

from dataclasses import replace

from converters.prepared import Prepared
from nereid_backend.errors import BundleError

DEFAULT_CAPACITY = 16
# With one, a batcher with any queue policy misses that it has become free, and requests wait for a tick of 500 ms.
_FEWEST_INSTANCES = 2


def bounded(prepared: Prepared, capacity: int) -> Prepared:
    """``prepared`` with as many requests waiting at most as ``capacity`` leaves beside those that run.

    Raises BundleError for models whose queue Triton cannot bound, or not without harm.
    """
    spec = prepared.spec
    where = f"model {spec.name!r}: --backpressure triton"
    if spec.script is not None:
        raise BundleError(f"{where} is of no use to a program, which bounds its own processes; leave it out")
    if spec.stages:
        raise BundleError(
            f"{where} does not go with hooks in processes of their own: a refusal inside stops such a model for ever "
            "(Triton before 26.02); use nereid serve"
        )
    if not spec.max_batch_size:
        raise BundleError(f"{where} needs a model with a batch axis: Triton has no queue limit for others")
    instances = max(_FEWEST_INSTANCES, spec.instances)
    if capacity <= instances:
        raise BundleError(
            f"{where} needs a --queue-capacity of {instances + 1} or more: {instances} requests run at a time"
        )
    more = "" if spec.instances == instances else f"{instances} processes instead of {spec.instances}, each with its "
    more += "own memory (with one, requests would stall for 500 ms); " if more else ""
    note = (
        f"Triton's own queue limit: {more}beyond {instances} running and {capacity - instances} waiting it answers "
        "UNAVAILABLE, which clients may retry at once and no metric counts; nereid serve needs none of this"
    )
    return replace(
        prepared,
        spec=replace(spec, instances=instances),
        most_waiting=capacity - instances,
        notes=(*prepared.notes, note),
    )
