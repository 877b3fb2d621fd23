from __future__ import annotations

import subprocess
import sys


def test_the_functions_keep_their_names_when_the_modules_of_the_same_names_are_loaded():
    code = (
        "import fordstone.connectors as connectors\n"
        "from fordstone.connectors.registry import source_delivery\n"
        "source_delivery(connectors.files('a.jsonl')), source_delivery(connectors.generator())\n"
        "from fordstone.connectors import files, generator, memory, stdout\n"
        "assert all(callable(made) for made in (files, generator, memory, stdout)), (files, generator, memory, stdout)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
