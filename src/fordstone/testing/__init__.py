"""The public test kit: pipelines over given rows, contract suites for connectors and state, and a disk in memory."""

from __future__ import annotations

from fordstone.testing.harness import Results, run_pipeline

__all__ = ["Results", "run_pipeline"]
