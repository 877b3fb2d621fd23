"""The pages whose code blocks start Spark.

What a page does in this process, it does in the Spark of the run. Pages whose commands alone start Spark do not wait for that one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import REPOSITORY, Page, blocks_of
from tests.docs.test_docs import PAGES, named, needs_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_PAGES = [page for page in PAGES if needs_spark(page)]


def starts_spark_here(page: Path) -> bool:
    return any(
        block.kind == "python" and "from fordstone.spark import" in block.body for block in blocks_of(page.read_text())
    )


def run_all(page: Path, directory: Path) -> None:
    directory.mkdir()
    with Page(name=named(page), directory=directory) as runner:
        runner.run_all(page.read_text())


@pytest.mark.parametrize("page", [page for page in SPARK_PAGES if starts_spark_here(page)], ids=named)
def test_every_code_block_of_the_page_runs(page: Path, tmp_path: Path, spark: SparkSession):
    run_all(page, tmp_path / "page")


@pytest.mark.spark
@pytest.mark.parametrize("page", [page for page in SPARK_PAGES if not starts_spark_here(page)], ids=named)
def test_every_code_block_of_the_page_runs_with_a_spark_of_its_own(page: Path, tmp_path: Path):
    run_all(page, tmp_path / "page")


def test_pages_about_spark_are_among_them():
    folder = REPOSITORY / "docs" / "how-to"
    pages = set(SPARK_PAGES)
    assert {REPOSITORY / "README.md", folder / "run-on-spark.md", folder / "move-state-to-spark-and-back.md"} <= pages
    assert starts_spark_here(folder / "run-on-spark.md")
    assert not starts_spark_here(REPOSITORY / "README.md")
