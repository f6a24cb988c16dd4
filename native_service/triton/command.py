"""How tritonserver is started: its command line and its environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from native_service.operation import preflight
from native_service.triton.addresses import TritonAddresses
from native_service.triton.embedded import TritonInstall

KEY_NAME = "nereid-key"
"""Of the key with which ``command`` restricts what only we may call."""
_EXIT_TIMEOUT_S, _STUB_TIMEOUT_S = 5, 60
_RESTRICTED = "model-repository,shared-memory,trace,logging"
# Where the kernel gives huge pages to those who ask (most distributions), large blocks of malloc lie in some: a run
# streams all weights of a model, and with small pages a tenth of the time goes into finding them.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def command(
    install: TritonInstall, repository: Path, addresses: TritonAddresses, shared_memory_prefix: str, key: str | None
) -> list[str]:
    """``key`` None: whoever reaches the gRPC address may call everything."""
    words = [str(install.server), f"--model-repository={repository}"]
    for kind in ("grpc", "metrics"):
        host, _, port = str(getattr(addresses, kind)).rpartition(":")
        words += [f"--{kind}-address={host}", f"--{kind}-port={port}"]
    words += [
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={_EXIT_TIMEOUT_S}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        f"--backend-config=python,stub-timeout-seconds={_STUB_TIMEOUT_S}",
        "--allow-http=false",
    ]
    if key is not None:
        words.append(f"--grpc-restricted-protocol={_RESTRICTED}:{KEY_NAME}={key}")
    if install.backend_directory is not None:
        words.append(f"--backend-directory={install.backend_directory}")
    if install.cache_directory is not None:
        words.append(f"--cache-directory={install.cache_directory}")
    return words


def environment(install: TritonInstall) -> dict[str, str]:
    """This process's, with what Triton and its models' processes need."""
    variables = dict(os.environ)
    # The stub takes its sys.prefix from the first python3 in PATH: the one this process runs in.
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables.get('PATH', os.defpath)}"
    variables["PYTHONUNBUFFERED"] = "1"
    variables.setdefault("GLIBC_TUNABLES", _HUGE_PAGES)
    if libraries := preflight.library_path(install):
        variables["LD_LIBRARY_PATH"] = libraries
    return variables
