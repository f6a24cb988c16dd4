"""Half a minute of what ``make soak`` does for ten: no wrong answer, no hung call, no permit or region left."""

import asyncio
from pathlib import Path

import pytest
import soak


@pytest.mark.triton
def test_mixed_load_and_deaths_leave_no_call_without_its_right_end(tmp_path: Path) -> None:
    served = soak.serve(tmp_path)
    try:
        missed = asyncio.run(soak.soak(served, 25, 2))
    finally:
        code, output = served.end()
    print(output)
    assert (missed, code) == ([], 0)
    assert "Traceback" not in output
