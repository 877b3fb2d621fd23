"""The pages whose code blocks start Spark. What they do in this process, they do in the Spark of the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import REPOSITORY, Page
from tests.docs.test_docs import PAGES, named, needs_spark
from tests.docs.test_examples_on_spark import check_saved

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_PAGES = [page for page in PAGES if needs_spark(page)]


@pytest.mark.parametrize("page", SPARK_PAGES, ids=named)
def test_every_code_block_of_the_page_runs(
    page: Path, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
):
    directory = tmp_path / "page"
    directory.mkdir()
    with Page(name=named(page), directory=directory) as runner:
        runner.run_all(page.read_text())
    if page.name == "README.md":
        assert check_saved(page.read_text(), directory, spark, monkeypatch)


def test_pages_about_spark_are_among_them():
    folder = REPOSITORY / "docs" / "how-to"
    assert {folder / "run-on-spark.md", folder / "move-state-to-spark-and-back.md"} <= set(SPARK_PAGES)
