"""A function of this process as a sink: it is called with the rows of each epoch, and the epoch's number.

Delivery is at least once: after a crash the last epoch may come again, with the same rows and the same number. An epoch without rows is left
out. The function is called by one thread of the node at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final

import polars as pl

from fordstone.connectors.base import (
    About,
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    LiveSpec,
    OpenContext,
    Sink,
    SinkStream,
    live_of,
)
from fordstone.errors import ConfigError, FordstoneError, SinkError

KIND: Final = "function"
_POSITIONAL: Final = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def function_sink(function: Callable[..., object]) -> ConnectorSpec:
    """Make a spec that carries a function. Raises `ConfigError` if it cannot be called with a frame, or a frame and an epoch."""
    try:
        inspect.signature(function).bind(*("frame", "epoch")[: 1 + takes_epoch(function)])
    except ValueError:
        pass  # written in C, without a signature
    except TypeError as error:
        raise ConfigError(
            f"{_name_of(function)} is called as f(frame) or f(frame, epoch), and cannot be: {error}. Change its parameters."
        ) from None
    return LiveSpec.around(function, kind=KIND, options={"function": _name_of(function)})


class FunctionKind(ConnectorKind):
    """The kind `function`."""

    capabilities = frozenset({Capability.IN_PROCESS})
    about = About(
        summary="a function of this process, called with the rows of each epoch",
        sink="print",
        guarantee="After a crash the last epoch may come again, with the same rows and the same number.",
        page="reference/connectors.md#functions",
    )

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        del spec
        return Delivery.AT_LEAST_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del context
        function = live_of(spec)
        if not callable(function):
            raise ConfigError(
                f"sink {stream.step}: its function is only in the process that declared the pipeline, and this plan was read back from "
                "JSON.\nUse files(...) or another connector for what is stored or deployed."
            )
        return FunctionSink(function, stream.step)


class FunctionSink(Sink):
    """Calls the function, and waits for it if it is async."""

    def __init__(self, function: Callable[..., object], step: str) -> None:
        self._function = function
        self._step = step
        self._takes_epoch = takes_epoch(function)
        self._loop: asyncio.AbstractEventLoop | None = None

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        self._call(frame, epoch)

    def write(self, frame: pl.DataFrame) -> None:
        self._call(frame, None)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def _call(self, frame: pl.DataFrame, epoch: int | None) -> None:
        if frame.is_empty():
            return
        try:
            given: Any = self._function(frame, epoch) if self._takes_epoch else self._function(frame)
            if inspect.isawaitable(given):
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                self._loop.run_until_complete(_awaited(given))
        except FordstoneError:
            raise
        except Exception as error:
            when = "" if epoch is None else f" on epoch {epoch}"
            raise SinkError(
                f"sink {self._step}: {_name_of(self._function)} failed{when}, with {frame.height} rows: {error!r}.\n"
                "Correct it and start again: these rows will be given to it again if the run has state=."
            ) from error


async def _awaited(given: Any) -> None:
    await given


def takes_epoch(function: Callable[..., object]) -> bool:
    """Whether a function is called with the epoch too: its second parameter is named `epoch`, or has no default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False  # written in C, without a signature
    positional = [one for one in parameters if one.kind in _POSITIONAL]
    return len(positional) > 1 and (positional[1].name == "epoch" or positional[1].default is inspect.Parameter.empty)


def _name_of(function: Callable[..., object]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
