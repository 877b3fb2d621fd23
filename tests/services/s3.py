"""A real S3 server: versitygw, which keeps objects as files in a folder, and writes conditionally as S3 does.

`python -m tests.services.s3` builds it, if that was not done yet. A run of all tests does so in the background (`tests.conftest`).
"""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Final

from tests.services.base import MissingServiceError, Server, free_port, installed, listens, run_installer

VERSION: Final = "v1.8.0"
KEY: Final = "test"
SECRET: Final = "test-secret"


def program() -> Path:
    """Return versitygw, built once per machine; the first time takes minutes."""

    def install(folder: Path) -> None:
        run_installer(
            *("go", "install", "-p", "1", f"github.com/versity/versitygw/cmd/versitygw@{VERSION}"),
            env={"GOBIN": str(folder), "GOFLAGS": "-buildvcs=false", "CGO_ENABLED": "0"},
        )

    found = installed(f"versitygw-{VERSION}", install) / "versitygw"
    if not found.exists():
        raise MissingServiceError(f"{found} is missing although it was built. Remove its folder, and try again.")
    return found


class S3(Server):
    """One gateway with its own folder. A bucket is a folder in it."""

    def __init__(self, folder: Path) -> None:
        self._data, side = folder / "data", folder / "side"
        for each in (self._data, side):
            each.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self._numbers = count(1)
        super().__init__(
            "versitygw",
            [program(), "--port", f"127.0.0.1:{self.port}", "posix", "--sidecar", side, self._data],
            log=folder / "versitygw.log",
            answers=lambda: listens(self.port),
            env={"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bucket(self) -> str:
        """Make a new bucket and return its name."""
        name = f"bucket{next(self._numbers)}"
        (self._data / name).mkdir()
        return name

    def environment(self, address: str | None = None) -> dict[str, str]:
        """Return what a client finds in its environment; `address` if it goes through a proxy."""
        return {
            "AWS_ENDPOINT_URL": address or self.address,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


def started(folder: Path) -> S3:
    server = S3(folder)
    server.start()
    return server


if __name__ == "__main__":
    program()
