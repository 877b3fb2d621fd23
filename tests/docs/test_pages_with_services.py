"""The pages whose code blocks need a real server: each is run with one that its environment names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import REPOSITORY, SERVED, Page
from tests.services.hdfs import Hdfs
from tests.services.s3 import S3


def run_page(name: str, directory: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in SERVED
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with Page(name=name, directory=directory, environment=environment) as runner:
        runner.run_all((REPOSITORY / name).read_text())


def test_s3_and_hdfs(
    s3: S3, s3_url: str, hdfs: Hdfs, hdfs_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = s3.environment() | {"BUCKET": s3_url, "FOLDER": hdfs_url}
    run_page("docs/how-to/s3-and-hdfs.md", tmp_path, environment, monkeypatch)
