from __future__ import annotations

import subprocess
import sys


def test_the_functions_keep_their_names_when_the_modules_of_the_same_names_are_loaded():
    code = (
        "import fordstone.connectors as connectors\n"
        "from fordstone.connectors.registry import sink_delivery, source_delivery\n"
        "source_delivery(connectors.files('a.jsonl')), source_delivery(connectors.generator())\n"
        "sink_delivery(connectors.delta('table'))\n"
        "from fordstone.connectors import delta, files, generator, memory, stdout\n"
        "made = (delta, files, generator, memory, stdout)\n"
        "assert all(callable(one) for one in made), made"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
