from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.serializers import CloudPickleSerializer
from tests.edge.process_functions import Visits
from tests.spark.micro import MicroSpark
from tests.spark.test_hosted_process import visits, write

from fordstone.spark.hosted.operator_host import state_names
from fordstone.spark.hosted.sent import HostProcessor, Lazy, source_class
from fordstone.spark.hosted.source import PipelineReader

WIRE = CloudPickleSerializer()


def half(row: float) -> float:
    return row / 2


def sent(value: Any) -> Any:
    """As it arrives in another process."""
    return WIRE.loads(WIRE.dumps(value))


def test_a_value_arrives_also_when_it_is_passed_on():
    arrived = sent(sent(Lazy({"here:half": half, "local:double:1": lambda x: 2 * x})))
    assert arrived.get()["here:half"](4.0) == 2.0
    assert arrived.get()["local:double:1"](4.0) == 8.0


def test_a_function_whose_module_is_missing_hurts_only_who_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("only_on_executors")
    exec("def half(x):\n    return x / 2\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    data = WIRE.dumps(Lazy(module.half))
    monkeypatch.delitem(sys.modules, module.__name__)
    arrived = WIRE.loads(data)
    again = WIRE.dumps(arrived)
    with pytest.raises(ModuleNotFoundError, match="only_on_executors"):
        arrived.get()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert WIRE.loads(again).get()(4.0) == 2.0


PLANS = """
import json
import sys
from types import SimpleNamespace
from pyspark.serializers import CloudPickleSerializer

source, processor = CloudPickleSerializer().loads(sys.stdin.buffer.read())
assert source.name() == "fordstone-pipeline"
reader = source({}).streamReader(source({}).schema())
CloudPickleSerializer().dumps(reader.read)
opened = []
processor.init(SimpleNamespace(getValueState=lambda name, _: opened.append(name), getMapState=lambda name, *_: opened.append(name)))
print(json.dumps([opened, [name for name in ("polars", "sqlglot", "fordstone.plan", "pandas") if name in sys.modules]]))
"""


def test_where_spark_plans_little_is_imported_and_no_function_of_the_user(tmp_path: Path):
    class Local(Visits):
        """Cannot be imported."""

    pipeline, _, _ = visits(write(tmp_path / "in", [[("a", 1, 1)]]), Local)
    query = MicroSpark(1).query(pipeline.plan(), pipeline.functions, state=tmp_path / "state")
    source = source_class(PipelineReader(query.setting, query.files, None, first_epoch=1, rows_max=10, tasks=2))
    processor = HostProcessor(query.setting, 1, state_names(query.setting, 1))
    done = subprocess.run(
        [sys.executable, "-c", PLANS], input=WIRE.dumps((source, processor)), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    states, heavy = json.loads(done.stdout)
    assert {"memo", "process_k:state_n", "process_k:timers", "process_k:waiting"} <= set(states)
    assert heavy == []
