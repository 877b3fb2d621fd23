from __future__ import annotations

import sys
from types import ModuleType

import pytest
from pyspark.serializers import CloudPickleSerializer

from fordstone.spark.hosted.stages import SentFunctions


def half(row: float) -> float:
    return row / 2


def sent(functions: SentFunctions) -> SentFunctions:
    """As it arrives in another process."""
    wire = CloudPickleSerializer()
    arrived = wire.loads(wire.dumps(functions))
    assert isinstance(arrived, SentFunctions)
    return arrived


def test_functions_arrive_also_when_they_are_passed_on_or_written_in_place():
    arrived = sent(sent(SentFunctions({"here:half": half, "local:double:1": lambda x: 2 * x})))
    assert set(arrived) == {"here:half", "local:double:1"}
    assert len(arrived) == 2
    assert arrived["here:half"](4.0) == 2.0
    assert arrived["local:double:1"](4.0) == 8.0


def test_a_function_whose_module_is_missing_hurts_only_who_asks_for_it(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("only_on_executors")
    exec("def half(x):\n    return x / 2\n", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    data = CloudPickleSerializer().dumps(SentFunctions({"only_on_executors:half": module.half}))
    monkeypatch.delitem(sys.modules, module.__name__)
    arrived = CloudPickleSerializer().loads(data)
    again = CloudPickleSerializer().dumps(arrived)
    with pytest.raises(ModuleNotFoundError, match="only_on_executors"):
        list(arrived)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert CloudPickleSerializer().loads(again)["only_on_executors:half"](4.0) == 2.0
