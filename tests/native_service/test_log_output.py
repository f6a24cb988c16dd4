from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from native_service.telemetry.log_output import BackgroundHandler


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def logger_to(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def read_until(end: int, last: bytes) -> bytes:
    data = b""
    deadline = time.monotonic() + 30
    while not data.endswith(last) and time.monotonic() < deadline:
        data += os.read(end, 65536)
    return data


def test_lines_arrive_in_order_whatever_they_hold(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1])
    logger = logger_to(handler)
    logger.warning("ünd %s", "\ud800")
    for number in range(100):
        logger.warning("line %d", number)
    handler.close()
    expected = "ünd \\ud800\n" + "".join(f"line {number}\n" for number in range(100))
    assert read_until(pipe[0], b"line 99\n").decode() == expected


def test_a_pipe_nobody_reads_blocks_no_one_and_the_loss_is_told(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1], most_bytes=300_000)
    logger = logger_to(handler)
    for _ in range(1000):
        logger.warning("x" * 999)  # 1 MB; the pipe holds 64 KiB
    handler.close()  # does not wait for the reader either
    lines: list[bytes] = []

    def read() -> None:
        with open(pipe[0], "rb", closefd=False) as reader:
            # The last of what was dropped may be told before or after the last line that was kept.
            while sum(1 if line.startswith(b"x") else int(line.split()[0]) for line in lines) < 1000:
                lines.append(reader.readline())

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(30)
    kept = [line for line in lines if line.startswith(b"x")]
    told = [line for line in lines if not line.startswith(b"x")]
    assert set(kept) == {b"x" * 999 + b"\n"}
    assert all(line.endswith(b"lines of the log were dropped: it is read too slowly\n") for line in told)
    assert len(kept) + sum(int(line.split()[0]) for line in told) == 1000
    assert len(kept) < 400


def test_a_process_whose_log_nobody_reads_ends() -> None:
    program = (
        "import logging, sys\n"
        "from native_service.telemetry.log_output import BackgroundHandler\n"
        "logging.basicConfig(handlers=[BackgroundHandler(2)])\n"
        "for _ in range(300):\n"
        "    logging.warning('x' * 999)\n"
        "print('done')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        output, _ = process.communicate()
    assert output == b"done\n"


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = BackgroundHandler(writer)
    logger_to(handler).warning("nobody hears this")
    handler.close()
    os.close(writer)


def test_a_flood_of_one_kind_is_cut_and_counted(pipe: tuple[int, int]) -> None:
    handler = BackgroundHandler(pipe[1])
    logger = logger_to(handler)
    for number in range(500):
        logger.warning("flood %d", number, extra={"kind": "flood"})
    logger.warning("something else")
    handler.close()
    lines = read_until(pipe[0], b"left out: flood\n").decode().splitlines()
    flooded = [line for line in lines if line.startswith("flood")]
    assert "something else" in lines
    assert len(flooded) + int(lines[-1].split()[0]) == 500
    assert len(flooded) < 100
