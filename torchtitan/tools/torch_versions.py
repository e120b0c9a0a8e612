"""The versions of torch that the tests pass with; `scripts/run_torch_versions.sh` runs the tests."""

import os

from torchtitan.tools.logging import logger, warn_once

# Version of torch, oldest first -> the Triton version that inductor needs in its CUDA builds.
# scripts/setup_env.sh reads these lines.
TESTED = {
    "2.11.0": "3.6.0",
    "2.12.1": "3.7.1",
    "2.13.0": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}


def minor_version(version: str) -> str:
    """Return "2.15" for "2.15.0", "2.15.1.dev20270101+cpu" and the like."""
    return ".".join(version.split(".")[:2])


def warn_if_newer(version: str) -> None:
    """Warn on rank 0, once per process, if this version of torch is newer than every tested one."""
    newest = minor_version([*TESTED][-1])
    found, known = (tuple(map(int, minor_version(v).split("."))) for v in (version, newest))
    if found > known and os.environ.get("RANK", "0") == "0":
        warn_once(
            logger,
            f"torch {version} is newer than {newest}, the newest that torchtitan was tested with",
        )
