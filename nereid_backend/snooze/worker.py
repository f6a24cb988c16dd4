"""The process of a worker model, run as a script by the model's own interpreter, and the frames it speaks.

SnoozeML's worker protocol, version 1. Frames travel over stdin and stdout: u32 length of the rest, u8 kind, u32 length
of the header, the header as JSON, then the tensors' values as f32; all little endian. ``READY`` (or ``ERROR``, and the
process ends with 1) is the first that comes, then each ``INFER`` is answered with ``RESULT`` or ``ERROR``. ``SHUTDOWN``
or the end of stdin ends the process with 0. A header lists ``{"tensors": [{"name", "shape", "dtype": "f32"}]}``.

Nothing but the standard library is imported here, and numpy where the model wants arrays: it is the user's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import struct
import sys
import traceback
import types
from array import array

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, BinaryIO

    Tensors = dict[str, Any]
    """By name: numpy arrays, or RawTensors."""
    Predict = Callable[[Tensors], object]

PROTOCOL = 1
READY, INFER, RESULT, ERROR, SHUTDOWN = 1, 2, 3, 4, 5
LARGEST_FRAME = 2**30
LENGTH = struct.Struct("<I")
_PREFIX = struct.Struct("<BI")


class Refused(Exception):
    """What goes wrong outside of the user's code; ``kind`` is the protocol's."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RawTensor:
    """A tensor without numpy: ``data`` is a flat, row-major ``array('f')``."""

    __slots__ = ("data", "shape")

    def __init__(self, shape: Sequence[int], data: Any) -> None:
        self.shape = tuple(int(size) for size in shape)
        self.data = data if isinstance(data, array) and data.typecode == "f" else array("f", data)
        if math.prod(self.shape) != len(self.data):
            raise ValueError(f"a RawTensor of shape {self.shape} has {len(self.data)} values")


# Frames.


def packed(kind: int, header: dict[str, Any], values_bytes: int = 0) -> bytes:
    """A frame up to its values, of which ``values_bytes`` follow. Raises Refused for one that is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    length = _PREFIX.size + len(text) + values_bytes
    if length > LARGEST_FRAME:
        raise Refused("runtime", f"a frame of {length} bytes, the protocol's largest has {LARGEST_FRAME}")
    return LENGTH.pack(length) + _PREFIX.pack(kind, len(text)) + text


def unpacked(body: bytearray) -> tuple[int, dict[str, Any], memoryview]:
    """Kind, header and values of a frame's ``body``, all after its length. Raises ValueError."""
    if len(body) < _PREFIX.size:
        raise ValueError(f"a frame of {len(body)} bytes")
    kind, size = _PREFIX.unpack_from(body)
    start = _PREFIX.size + size
    header = json.loads(body[_PREFIX.size : start]) if size and start <= len(body) else {}
    if start > len(body) or not isinstance(header, dict):
        raise ValueError(f"a header of {size} bytes in a frame of {len(body)}, or one that is no object")
    return kind, header, memoryview(body)[start:]


def _read(stream: BinaryIO) -> tuple[int, dict[str, Any], memoryview] | None:
    """The next frame, None when the other side is gone. Raises ValueError for what is none."""
    prefix = stream.read(LENGTH.size)
    if not prefix:
        return None
    (length,) = LENGTH.unpack(prefix)
    if length > LARGEST_FRAME:
        raise ValueError(f"a frame of {length} bytes")
    body, got = bytearray(length), 0
    view = memoryview(body)
    while got < length:
        count = stream.readinto(view[got:])  # type: ignore[attr-defined]
        if not count:
            return None
        got += count
    return unpacked(body)


def _write(stream: BinaryIO, kind: int, header: dict[str, Any], values: Sequence[memoryview] = ()) -> None:
    stream.write(packed(kind, header, sum(view.nbytes for view in values)))
    for view in values:
        stream.write(view)
    stream.flush()


# Tensors.


def _taken(header: dict[str, Any], values: memoryview, raw: bool) -> Tensors:
    """The tensors of an ``INFER`` frame; arrays are views of it. Raises Refused."""
    tensors = {}
    start = 0
    for told in header.get("tensors", ()):
        name, shape = str(told["name"]), [int(size) for size in told["shape"]]
        if told.get("dtype", "f32") != "f32":
            raise Refused("invalid_input", f"tensor {name!r} has dtype {told['dtype']}, only f32 is taken")
        count = math.prod(shape)
        end = start + 4 * count
        if end > len(values):
            raise Refused("invalid_input", f"tensor {name!r} is longer than its frame")
        if raw:
            data = array("f", values[start:end].tobytes())
            if sys.byteorder == "big":
                data.byteswap()
            tensors[name] = _raw_tensor()(shape, data)
        else:
            tensors[name] = _numpy().frombuffer(values, "<f4", count, start).reshape(shape)
        start = end
    if start != len(values):
        raise Refused("invalid_input", f"the frame has {len(values) - start} bytes after its tensors")
    return tensors


def _given(outputs: object, rows: int | None) -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the values of what ``predict`` gave. Raises Refused."""
    if not isinstance(outputs, dict) or not outputs:
        raise Refused(
            "runtime", f"predict must give a dict of tensors that is not empty, gave {type(outputs).__name__}"
        )
    told, values = [], []
    for name, value in outputs.items():
        if not isinstance(name, str):
            raise Refused("runtime", f"names of outputs must be texts, {name!r} is of type {type(name).__name__}")
        shape, view = _flat(name, value)
        if rows is not None and shape[:1] != [rows]:
            raise Refused("runtime", f"output {name!r} has shape {shape}; its first axis must be the batch's, {rows}")
        told.append({"name": name, "shape": shape, "dtype": "f32"})
        values.append(view)
    return {"tensors": told}, values


def _flat(name: str, value: Any) -> tuple[list[int], memoryview]:
    """The shape and the values of an output, as f32. Raises Refused."""
    data = getattr(value, "data", None)
    if isinstance(data, array) and data.typecode == "f":  # a RawTensor, ours or the SDK's
        if sys.byteorder == "big":
            data = array("f", data)
            data.byteswap()
        return list(value.shape), memoryview(data).cast("B")
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):  # torch's
            value = value.detach().cpu().numpy()
        values = _numpy().ascontiguousarray(value, dtype="<f4")
    except Refused:
        raise
    except Exception as error:
        raise Refused("runtime", f"output {name!r} cannot be turned into float32 ({error}); return arrays") from error
    return list(values.shape), memoryview(values.reshape(-1).view("u1"))


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise Refused(
            "load", 'numpy is not installed: add it to requirements.txt, or set "tensor_format": "raw"'
        ) from None
    return numpy


def _raw_tensor() -> Any:
    """The SDK's RawTensor, which models import from it; ours where there is no SDK (``_stand_in``)."""
    from snoozeml.worker import RawTensor as Known  # type: ignore[import-not-found,unused-ignore]

    return Known


def _stand_in() -> None:
    """Let a model import ``snoozeml.worker`` where the SDK, which it does not need here, is not installed."""
    if importlib.util.find_spec("snoozeml") is None:
        package, module = types.ModuleType("snoozeml"), types.ModuleType("snoozeml.worker")
        module.RawTensor, module.WorkerError = RawTensor, Refused  # type: ignore[attr-defined]
        package.worker, package.__path__ = module, []  # type: ignore[attr-defined]
        sys.modules.update({"snoozeml": package, "snoozeml.worker": module})


# The model.


def _kind(error: BaseException) -> str:
    """What the protocol calls an error that came out of the model."""
    kind = getattr(error, "kind", None)
    if kind in ("load", "oom", "invalid_input", "runtime"):  # a WorkerError
        return str(kind)
    name = type(error).__name__
    if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "out of memory" in str(error).lower():
        return "oom"
    return "invalid_input" if isinstance(error, (ValueError, KeyError)) else "runtime"


def _open(folder: str, entrypoint: str, class_name: str, device: str) -> Predict:
    """Import the model's class, load it and give its ``predict``. Raises whatever the user's code does."""
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location("snooze_user_model", f"{folder}/{entrypoint}")
    if spec is None or spec.loader is None:
        raise Refused("load", f"{entrypoint} cannot be imported; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["snooze_user_model"] = module
    spec.loader.exec_module(module)
    cls = getattr(module, class_name, None)
    if cls is None:
        raise Refused("load", f"{entrypoint} has no class {class_name!r}")
    model = cls()
    for method in ("load", "predict"):
        if not callable(getattr(model, method, None)):
            raise Refused("load", f"class {class_name!r} has no method {method!r}")
    model.load(folder, device)
    predict: Predict = model.predict
    return predict


def _serve(predict: Predict, raw: bool, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer frames until the other side is gone or says so."""
    while True:
        frame = _read(requests)
        if frame is None or frame[0] == SHUTDOWN:
            return
        kind, header, values = frame
        try:
            if kind != INFER:
                raise Refused("runtime", f"a frame of kind {kind}, expected {INFER}")
            inputs = _taken(header, values, raw)
            batches = {told["shape"][0] for told in header["tensors"] if told["shape"]}
            result, parts = _given(predict(inputs), batches.pop() if len(batches) == 1 else None)
            _write(answers, RESULT, result, parts)
        except Exception as error:  # noqa: BLE001 - whatever a model raises is an answer
            _tell(error, answers, _kind(error), quiet=bool(header.get("quiet")))


def _tell(error: BaseException, answers: BinaryIO, kind: str, *, quiet: bool = False) -> None:
    if not (quiet or isinstance(error, Refused)):
        traceback.print_exc(file=sys.stderr)
    text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    _write(answers, ERROR, {"kind": kind, "message": text})


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Stdin and stdout for us alone: the model finds nothing to read, and what it prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def _main() -> int:
    options = json.loads(sys.argv[1])
    sys.path.pop(0)  # this file's folder
    requests, answers = _take_streams()
    try:
        _stand_in()
        if not options["raw"]:
            _numpy()
        predict = _open(options["folder"], options["entrypoint"], options["class_name"], options["device"])
    except BaseException as error:  # noqa: BLE001 - also a SystemExit is an answer
        _tell(error, answers, "oom" if _kind(error) == "oom" else "load")
        return 1
    _write(
        answers, READY, {"protocol": PROTOCOL, "info": {"python": sys.version.split()[0], "device": options["device"]}}
    )
    _serve(predict, options["raw"], requests, answers)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
