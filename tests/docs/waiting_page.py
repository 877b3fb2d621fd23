"""A page that starts processes and does not end: test_interrupted.py runs it in a pytest of its own. No part of the suite."""

from __future__ import annotations

import os
from pathlib import Path

from tests.docs.blocks import Page

PAGE = """
```console
$ (echo $BASHPID > one; exec sleep 3600) &
> setsid --fork sh -c 'echo $$ > two; exec sleep 3600'
> python -c "import os, time; open('three', 'w').write(str(os.getpid())); time.sleep(3600)"
```
"""


def test_a_page_that_does_not_end() -> None:
    with Page(name="waiting.md", directory=Path(os.environ["FORDSTONE_TEST_FOLDER"])) as runner:
        runner.run_all(PAGE)
