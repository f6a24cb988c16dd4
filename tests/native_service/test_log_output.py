from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from native_service.log_output import BackgroundHandler


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
    logger.warning("end")
    told = read_until(pipe[0], b"too slowly\n")
    lost = int(told.splitlines()[-1].split()[0])
    assert told.count(b"x" * 999 + b"\n") + lost >= 1000
    assert lost > 600


def test_a_process_whose_log_nobody_reads_ends() -> None:
    program = (
        "import logging, sys\n"
        "from native_service.log_output import BackgroundHandler\n"
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
