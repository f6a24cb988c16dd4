"""model_inference.textproto of a nereid folder: what the model takes and gives.

Two notations are read. Real protobuf text format, parsed by the protobuf library against the message below; and, for
files that are not that, nereid's own line form (``key: value`` per line, unquoted names, blocks of several lines), as
nereid-server reads it. Unknown keys are refused in both, a deliberate difference: a typo would otherwise be a silent
default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from converters.messages import message_classes
from nereid_backend import dtypes
from nereid_backend.errors import ContractError, short_repr
from nereid_backend.spec import MAX_SIZE, VARIABLE, ModelSpec, TensorSpec

CONTRACT_FILE = "model_inference.textproto"
DEFAULT_DATATYPE = "FP32"
FLAT_INPUT, FLAT_OUTPUT = "input", "output"
ONE_NUMBER = (1,)
"""What dims say of a tensor that is one number (per row): the form has no empty dims."""

# Ours; nereid-server, which ignores unknown keys, reads such a contract as well.
_SCRIPT_KEYS = ("warm", "time_limit_s")
_TOP_KEYS = ("input_shape", "output_shape", "data_type", "max_batch_size", *_SCRIPT_KEYS)
_INTEGER_KEYS = ("max_batch_size", "time_limit_s")
_TENSOR_KEYS = ("name", "data_type", "dims")


@dataclass(frozen=True, slots=True)
class ContractTensor:
    """A declared tensor. ``dims`` exclude the batch; None when a flat contract leaves the output open."""

    name: str
    dtype: str
    dims: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Contract:
    """``flat``: written as input_shape/output_shape, where data_type does not bind the output.

    ``warm`` and ``time_limit_s`` are for folders whose model is a program.
    """

    inputs: tuple[ContractTensor, ...]
    outputs: tuple[ContractTensor, ...]
    max_batch_size: int
    flat: bool
    warm: bool = False
    time_limit_s: int | None = None

    @property
    def script_keys(self) -> tuple[str, ...]:
        """The keys given that only a program's folder may have."""
        return tuple(key for key in _SCRIPT_KEYS if getattr(self, key))


def contract_of(spec: ModelSpec) -> Contract:
    """The contract under which a model file is served as ``spec`` says. Raises ContractError."""

    def tensors(found: Iterable[TensorSpec]) -> tuple[ContractTensor, ...]:
        return tuple(ContractTensor(tensor.name, tensor.dtype, spec.dims(tensor)) for tensor in found)

    return Contract(tensors(spec.inputs), tensors(spec.outputs), spec.max_batch_size, flat=False)


def text_of(contract: Contract) -> str:
    """A contract as a file with input and output blocks, which nereid-server reads as well. Raises ContractError."""
    message = _message_class()(max_batch_size=contract.max_batch_size)
    for field, tensors in ((message.input, contract.inputs), (message.output, contract.outputs)):
        for tensor in tensors:
            kserve = dtypes.element(tensor.dtype).kserve or tensor.dtype
            field.add(name=tensor.name, data_type=_known(kserve), dims=tensor.dims)
    text: str = text_format.MessageToString(message, as_utf8=True, use_short_repeated_primitives=True)
    if parse(text) != contract:
        raise ContractError("does not read back as written; please report this model")
    return text


def read(path: Path) -> Contract:
    """Read a contract file. Raises ContractError."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ContractError(f"{path.name}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ContractError(f"{path.name}: is not UTF-8 text") from None
    except ContractError as error:
        raise ContractError(f"{path.name}: {error}") from None


def parse(text: str) -> Contract:
    """Parse a contract in either notation. Raises ContractError."""
    try:
        raw = _parse_text_format(text)
    except text_format.ParseError as error:
        raw = _parse_lines(text, str(error))
    return _contract(raw)


def _contract(raw: Mapping[str, Any]) -> Contract:
    size = raw.get("max_batch_size", 0)
    if not 0 <= size <= MAX_SIZE:
        raise ContractError(f"max_batch_size must be >= 0 and <= {MAX_SIZE}, got {size}")
    limit = raw.get("time_limit_s", 0)
    if not 0 <= limit <= MAX_SIZE:
        raise ContractError(f"time_limit_s must be >= 1 and <= {MAX_SIZE}, got {limit}; leave it out for a day")
    script: dict[str, Any] = {"warm": raw.get("warm", False), "time_limit_s": limit or None}
    if raw.get("input") or raw.get("output"):
        for key in ("input_shape", "output_shape", "data_type"):
            if key in raw:
                raise ContractError(f"{key} belongs to the flat form; this file declares input and output blocks")
        inputs, outputs = (tuple(_tensor(b, kind) for b in raw.get(kind, ())) for kind in ("input", "output"))
        if not inputs or not outputs:
            raise ContractError("needs at least one input block and one output block")
        for kind, tensors in (("input", inputs), ("output", outputs)):
            names = [t.name for t in tensors]
            if duplicates := {n for n in names if names.count(n) > 1}:
                raise ContractError(f"{kind} name {min(duplicates)!r} is declared twice")
        return Contract(inputs, outputs, size, flat=False, **script)
    if "input_shape" not in raw and "output_shape" not in raw:
        raise ContractError("needs input_shape, output_shape, or input and output blocks")
    dtype = _dtype(raw.get("data_type", DEFAULT_DATATYPE))
    inputs = ()
    if "input_shape" in raw:
        inputs = (ContractTensor(FLAT_INPUT, dtype, _dims(raw["input_shape"], "input_shape")),)
    dims = _dims(raw["output_shape"], "output_shape") if "output_shape" in raw else None
    return Contract(inputs, (ContractTensor(FLAT_OUTPUT, dtype, dims),), size, flat=True, **script)


def _tensor(block: Mapping[str, Any], kind: str) -> ContractTensor:
    name = block.get("name")
    if not name:
        raise ContractError(f"an {kind} block has no name")
    if not name.isprintable():
        raise ContractError(f"{kind} name {short_repr(name)} has characters that cannot be printed; rename it")
    if "dims" not in block:
        raise ContractError(f"{kind} {name!r} has no dims")
    return ContractTensor(
        name, _dtype(block.get("data_type", DEFAULT_DATATYPE)), _dims(block["dims"], f"{kind} {name!r} dims")
    )


def _dtype(kserve: str) -> str:
    return dtypes.by_kserve(_known(kserve)).token


def _known(kserve: str) -> str:
    known = [row.kserve for row in dtypes.TABLE if row.kserve]
    if kserve not in known:
        raise ContractError(f"data_type {kserve!r} is not supported; known: {', '.join(known)}")
    return kserve


def _dims(values: list[int], where: str) -> tuple[int, ...]:
    if not values:
        raise ContractError(f"{where} is empty; list at least one dimension")
    for value in values:
        if value != VARIABLE and not 1 <= value <= MAX_SIZE:
            raise ContractError(
                f"{where} has {value}; dimensions are -1 or >= 1 (and <= {MAX_SIZE}) and exclude the batch"
            )
    return tuple(values)


# Protobuf text format.


@cache
def _message_class() -> Any:
    """ModelInferenceConfig with both forms. Field numbers are irrelevant to the text format."""
    tensor = [("name", 1, "string"), ("data_type", 2, "string"), ("dims", 3, "int64[]")]
    config = [
        ("input_shape", 1, "int64[]"),
        ("output_shape", 2, "int64[]"),
        ("data_type", 3, "string"),
        ("max_batch_size", 4, "int64"),
        ("input", 5, "Tensor[]"),
        ("output", 6, "Tensor[]"),
        ("warm", 7, "bool"),
        ("time_limit_s", 8, "int64"),
    ]
    return message_classes("nereid.contract", {"Tensor": tensor, "Config": config}, "proto3")["Config"]


def _parse_text_format(text: str) -> Mapping[str, Any]:
    # An unquoted datatype is an enum value in text format and plain in the line form: both mean the string.
    quoted = re.sub(r"(\bdata_type\s*:\s*)([A-Za-z]\w*)", r'\1"\2"', text)
    message = text_format.Parse(quoted, _message_class()())
    text = re.sub(r"#.*", "", text)  # what the message cannot show: repetition and emptiness
    for key in ("input_shape", "output_shape"):
        if len(re.findall(rf"^\s*{key}\s*:\s*\[", text, re.MULTILINE)) > 1:
            raise ContractError(f"{key} is given twice; keep one")
    if re.search(r"\b(?:input_shape|output_shape|dims)\s*:\s*\[\s*\]", text):
        raise ContractError("a shape is empty; list at least one dimension")
    return _as_mapping(message)


def _as_mapping(message: Any) -> Mapping[str, Any]:
    result: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None:
            result[field.name] = [_as_mapping(item) for item in value]
        else:
            result[field.name] = value if isinstance(value, str | int) else list(value)
    return result


# The line form.


def _parse_lines(text: str, text_format_problem: str) -> Mapping[str, Any]:
    raw: dict[str, Any] = {}
    block: dict[str, Any] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        if opened := re.match(r"(input|output) ?\{", line):
            if block is not None:
                raise ContractError(f"line {number}: a block inside a block ({text_format_problem})")
            if "}" in line:
                raise ContractError(f"line {number}: not valid text format ({text_format_problem})")
            block = {}
            raw.setdefault(opened[1], []).append(block)
        elif line == "}":
            if block is None:
                raise ContractError(f"line {number}: a closing brace without a block")
            block = None
        else:
            key, colon, value = line.partition(":")
            if not colon:
                raise ContractError(f"line {number}: expected 'key: value', got {line!r} ({text_format_problem})")
            _line_field(raw if block is None else block, key.strip(), value.strip(), block is not None, number)
    if block is not None:
        raise ContractError("a block is not closed; put } on a line of its own")
    return raw


def _integer(text: str) -> int:
    if not re.fullmatch(r"\s*-?[0-9]{1,40}\s*", text):
        raise ValueError
    return int(text)


def _line_field(target: dict[str, Any], key: str, value: str, in_block: bool, number: int) -> None:
    known = _TENSOR_KEYS if in_block else _TOP_KEYS
    if key not in known:
        raise ContractError(f"line {number}: unknown key {short_repr(key)}; known here: {', '.join(known)}")
    if key in ("name", "data_type"):
        target[key] = value.strip("\"'")
        return
    try:
        if key == "warm":
            target[key] = {"true": True, "false": False}[value]
            return
        if key in _INTEGER_KEYS:
            target[key] = _integer(value)
            return
        if not (value.startswith("[") and value.endswith("]")):
            raise ValueError
        target[key] = [_integer(item) for item in value[1:-1].split(",")] if value[1:-1].strip() else []
    except (ValueError, KeyError):
        expected = "an integer" if key in _INTEGER_KEYS else "integers in brackets such as [-1, 16]"
        expected = "true or false" if key == "warm" else expected
        raise ContractError(f"line {number}: {key} must be {expected}, got {short_repr(value)}") from None
