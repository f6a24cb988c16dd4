"""A multipart upload: its file goes to the disk as it comes, everything else of it is small and bounded.

Parts may come in any order, so nothing is decided before the last. Only kinds of files that are data are taken: never
one that runs code when it is read.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import ValidationError

from native_service.settings.errors import describe
from native_service.snooze.models_file import ModelKeys
from native_service.snooze.uploaded import FOLDER
from nereid_backend.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotOffered,
    OverLimit,
    RepositoryError,
    short_repr,
)

FILE = "file"
_KINDS = ("onnx", "xgboost")
_NUMBERS = (
    "max_batch_size",
    "max_batch_delay_ms",
    "idle_timeout_secs",
    "min_residency_secs",
    "autoscale_queue_threshold",
    "max_replicas",
)
_TEXTS = ("model_id", "description", "routing_strategy", "device")
_FLAGS = {"true": True, "false": False}
_SWITCHES = ("pinned", "overwrite")
_PARTS = (*_NUMBERS, *_TEXTS, *_SWITCHES, FILE)
_LONGEST_TEXT_BYTES = 4096
# A part that says nothing for so long, and an upload that takes so long, is given up.
_SILENCE_S, _LONGEST_S = 30.0, 3600.0
_CHUNK_BYTES = 256 * 1024
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
# What stands in their place in the paths of REST.
_ROUTES = ("upload", "refresh")


class Upload(NamedTuple):
    """``file`` lies in a folder that goes with the upload; its name is the model's and the ending of its kind."""

    model_id: str
    file: Path
    overwrite: bool
    description: str | None
    keys: ModelKeys


@asynccontextmanager
async def received(request: web.Request, folder: Path, most_bytes: int) -> AsyncIterator[Upload]:
    """The upload that ``request`` is, put into a place of its own in the folder of models until the end.

    Raises InvalidArgument, OverLimit, NotOffered, DeadlineExceeded, RepositoryError.
    """
    scratch = await asyncio.to_thread(_make_place, folder)
    place = Path(scratch.name)
    try:
        async with _in_time(_LONGEST_S, "the upload takes too long"):
            parts, filename = await _read_parts(request, place / "part", most_bytes)
        yield _checked(parts, filename, place)
    finally:
        await asyncio.to_thread(scratch.cleanup)


def checked_id(model_id: str) -> str:
    """``model_id`` if an uploaded model may be called so. Raises InvalidArgument."""
    if not _ID.fullmatch(model_id) or model_id in _ROUTES:
        raise InvalidArgument(
            f"model_id {short_repr(model_id)} must be 1 to 128 letters, digits, '.', '_' and '-', not begin with '.', "
            f"and not be {' or '.join(_ROUTES)}"
        )
    return model_id


def _make_place(folder: Path) -> tempfile.TemporaryDirectory[str]:
    from converters import durable

    try:
        (folder / FOLDER).mkdir(mode=0o700, exist_ok=True)
        return durable.scratch(folder / FOLDER, "upload-")
    except OSError as error:
        raise RepositoryError(f"the folder of models takes no uploads ({error.strerror})") from None


async def _read_parts(request: web.Request, target: Path, most_bytes: int) -> tuple[dict[str, str], str]:
    """The texts by name, and the name that the file came with; the file itself is written to ``target``."""
    if not request.content_type.startswith("multipart/form-data"):
        raise InvalidArgument("an upload must be multipart/form-data")
    if (coding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise InvalidArgument(f"an upload in the Content-Encoding {short_repr(coding)} is not read; send it plain")
    texts: dict[str, str] = {}
    filename: str | None = None
    try:
        reader = await request.multipart()
        while (part := await _next(reader)) is not None:
            name = part.name if isinstance(part, BodyPartReader) else None
            if name not in _PARTS or not isinstance(part, BodyPartReader):
                raise InvalidArgument(f"part {short_repr(name)} is not known; expected {', '.join(_PARTS)}")
            if name in texts or (name == FILE and filename is not None):
                raise InvalidArgument(f"part {name!r} comes twice; send it once")
            if name == FILE:
                filename = part.filename or ""
                await _write(part, target, most_bytes)
            else:
                texts[name] = await _text(part, name)
    except (HttpProcessingError, ValueError, LookupError, AssertionError) as error:  # aiohttp's, for no multipart
        raise InvalidArgument(f"the body is not multipart/form-data ({type(error).__name__})") from None
    if filename is None:
        raise InvalidArgument(f"the upload has no part {FILE!r}")
    return texts, filename


async def _next(reader: Any) -> Any:
    async with _in_time(_SILENCE_S, "the upload stands still"):
        return await reader.next()


async def _chunk(part: BodyPartReader) -> bytes:
    async with _in_time(_SILENCE_S, "the upload stands still"):
        return bytes(await part.read_chunk(_CHUNK_BYTES))


@asynccontextmanager
async def _in_time(limit_s: float, text: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded(f"{text}, {limit_s:g} s at most; send it again") from None


async def _text(part: BodyPartReader, name: str) -> str:
    data = b""
    while chunk := await _chunk(part):
        data += chunk
        if len(data) > _LONGEST_TEXT_BYTES:
            raise InvalidArgument(f"part {name!r} is longer than {_LONGEST_TEXT_BYTES} bytes")
    return data.decode()


async def _write(part: BodyPartReader, target: Path, most_bytes: int) -> None:
    """Write the part to ``target`` and sync it to the disk."""
    written = 0
    try:
        with target.open("xb") as file:
            while chunk := await _chunk(part):
                written += len(chunk)
                if written > most_bytes:
                    raise OverLimit(f"the file is over the limit, {most_bytes} bytes (server.limits.max_upload_bytes)")
                await asyncio.to_thread(file.write, chunk)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
    except OSError as error:
        raise RepositoryError(f"the upload cannot be written ({error.strerror})") from None


def _checked(parts: dict[str, str], filename: str, place: Path) -> Upload:
    from converters import kinds

    # It only says what kind of file this is, and perhaps a name.
    given = filename.rpartition("/")[2]
    kind = next((kind for kind in kinds.FILE_KINDS if kind.name in _KINDS and given.endswith(kind.suffixes)), None)
    if kind is None:
        endings = " or ".join(kind.suffixes[0] for kind in kinds.FILE_KINDS if kind.name in _KINDS)
        raise NotOffered(f"file {short_repr(given)} is of a kind that cannot be uploaded; send {endings}")
    ending = next(suffix for suffix in kind.suffixes if given.endswith(suffix))
    model_id = checked_id(parts["model_id"].strip() if "model_id" in parts else given.removesuffix(ending))
    # A .json may have any name of the settings of a folder.
    file = place / f"{model_id}{kind.suffixes[0] if ending == '.json' else ending}"
    (place / "part").rename(file)
    switches = {name: _FLAGS.get(parts.get(name, "false").strip().lower()) for name in _SWITCHES}
    if wrong := [name for name, value in switches.items() if value is None]:
        raise InvalidArgument(f"part {wrong[0]!r} must be true or false, got {short_repr(parts[wrong[0]])}")
    raw: dict[str, Any] = {name: _number(name, parts[name]) for name in _NUMBERS if name in parts}
    raw |= {name: parts[name] for name in ("routing_strategy", "device") if name in parts}
    if "pinned" in parts:
        raw["pinned"] = switches["pinned"]
    try:
        keys = ModelKeys.model_validate(raw)
    except ValidationError as error:
        raise InvalidArgument("; ".join(describe(Path("upload"), error))) from None
    return Upload(model_id, file, switches["overwrite"] is True, parts.get("description"), keys)


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text.strip()):
        raise InvalidArgument(f"part {name!r} must be a whole number, got {short_repr(text)}")
    return int(text)
