"""Every code block in README and docs runs and does what the page says; every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.blocks import KINDS, REPOSITORY, SERVED, Page, blocks_of, commands_of

PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


def named(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are commonly made."""
    titles = (heading["title"] for heading in _HEADING.finditer(page.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def needs_spark(page: Path) -> bool:
    """Whether a block of the page starts Spark, here or in a process of its own. Such pages are run by test_pages_on_spark."""
    blocks = blocks_of(page.read_text())
    commands = [command.text for block in blocks if block.kind == "console" for command in commands_of(block.body)]
    code = "\n".join([*commands, *(block.body for block in blocks if block.kind == "python")])
    return (
        re.search(r"^from fordstone\.spark import|--on spark -|spark-submit|import-spark \w", code, re.MULTILINE)
        is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if not needs_spark(page) and named(page) not in SERVED], ids=named
)
def test_every_code_block_of_the_page_runs(page: Path, tmp_path: Path):
    with Page(name=named(page), directory=tmp_path) as runner:
        runner.run_all(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_code_block_is_of_a_kind_that_is_run_or_shown_on_purpose(page: Path):
    text = page.read_text()
    assert {block.kind for block in blocks_of(text)} <= KINDS
    assert text.count("```") == sum(2 + 2 * (block.printed is not None) for block in blocks_of(text))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_of_the_page_leads_to_a_file_and_a_heading_in_it(page: Path):
    for link in _LINK.finditer(page.read_text()):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{named(page)} links to {link['target']}, which is not there"
        assert not anchor or anchor in anchors_of(file), f"{named(page)} links to {link['target']}: no such heading"


def test_every_page_is_linked_from_the_index():
    index = REPOSITORY / "docs" / "index.md"
    linked = {(index.parent / link["target"].partition("#")[0]).resolve() for link in _LINK.finditer(index.read_text())}
    pages = {page for page in PAGES if page.is_relative_to(index.parent) and page != index}
    assert sorted(map(named, pages - linked)) == []
