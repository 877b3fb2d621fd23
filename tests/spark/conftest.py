"""What tests of the hosted way share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: processes die in these tests, machines do not."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
