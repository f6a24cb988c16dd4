"""A model to try a server with: ``snooze serve --demo`` puts it into the folder of models."""

from __future__ import annotations

import base64
from pathlib import Path

from nereid_backend.errors import SettingsError

# ONNX, IR 8, opset 17: output = input * two, both FP32 [batch, 4].
_ONNX = (
    "CAgSADptChkKBWlucHV0CgN0d28SBm91dHB1dCIDTXVsEgRkZW1vKg0QASIEAAAAQEIDdHdvWhwKBWlucHV0EhMKEQgBEg0KBxIFYmF0Y2gKAggE"
    "Yh0KBm91dHB1dBITChEIARINCgcSBWJhdGNoCgIIBEIECgAQEQ=="
)


def write(folder: Path, name: str) -> None:
    """Put the model into ``folder``, which is made, unless there is a file of that name. Raises SettingsError."""
    path = folder / f"{name}.onnx"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(base64.b64decode(_ONNX))
    except OSError as error:
        raise SettingsError(f"the demo model cannot be put into {folder} ({error.strerror})") from None
