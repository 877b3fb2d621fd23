"""The kind `files`: what the planner and both engines ask of it, for local disks and for URLs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from fordstone.connectors.base import (
    About,
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    PartWriter,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    options_of,
)
from fordstone.connectors.files.columns import SAMPLE_FILES, infer, schema_text
from fordstone.connectors.files.remote import (
    RemoteFileSource,
    first_remote_output,
    open_remote_parts,
    open_remote_sink,
)
from fordstone.connectors.files.rows import PART_PREFIX, ROWS_PREFIX
from fordstone.connectors.files.series import describe
from fordstone.connectors.files.settings import FileSettings
from fordstone.connectors.files.sink import epoch_name, first_output, open_file_parts, open_file_sink
from fordstone.connectors.files.source import FileSource, pattern_of
from fordstone.lang.schema import Schema


class FilesKind(ConnectorKind):
    """The kind `files`.

    Where several machines run one pipeline (the executors of a Spark cluster), each must see the files of a source under
    the same path: on a shared file system, or as copies that are the same. A path that is not absolute is taken from
    the working directory of the process that opens the source.
    """

    capabilities = frozenset({Capability.OWNS_PATH, Capability.SET_ASIDE})
    about = About(
        summary="JSON lines, CSV, Parquet and Arrow files, on a disk or at a URL",
        source='files("in/*.jsonl")',
        sink='files("out/results", format="parquet")',
        guarantee="One file per epoch, or one directory of parts, which appears as a whole. Files at a URL need a package for its store.",
        page="reference/connectors.md#files",
    )

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        options_of(spec, FileSettings)
        return Delivery.EXACTLY_ONCE

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        """An epoch is a file: there or not."""
        options_of(spec, FileSettings)
        return Delivery.EXACTLY_ONCE

    def fences(self, spec: ConnectorSpec) -> bool:
        """On a file system, where a rename fails once its directory is gone. A store of objects has nothing of that kind."""
        return not options_of(spec, FileSettings).is_url

    def reads_from(self, spec: ConnectorSpec, written: ConnectorSpec) -> bool:
        """By the names of the files that a sink writes."""
        ending = written.options.get("format")
        names = (f"{epoch_name(1)}.{ending}", f"{epoch_name(1)}/{PART_PREFIX}1.{ending}", f"{ROWS_PREFIX}1.{ending}")
        pattern = pattern_of(_whole(str(spec.options["path"])))
        return any(pattern.fullmatch(f"{self.place(written)}/{name}") for name in names)

    def place(self, spec: ConnectorSpec) -> str:
        return _whole(str(spec.options["path"]))

    def describe_source(self, spec: ConnectorSpec) -> Mapping[str, str]:
        settings = options_of(spec, FileSettings)
        return {} if settings.is_url else {"series": describe(settings.series)}

    def first_look(self, spec: ConnectorSpec) -> str | None:
        settings = options_of(spec, FileSettings)
        source = _source(settings, SourceOptions(schema=Schema(()), bounded=False))
        with ExitStack() as stack:
            found = source.partitions()[: SAMPLE_FILES if settings.is_url else None]
            paths = [stack.enter_context(source.sample(partition)) for partition in found]
            inferred = infer(paths, settings) if paths else None
        return None if inferred is None or not inferred.columns else schema_text(inferred)

    def earlier_output(self, spec: ConnectorSpec) -> str | None:
        settings = options_of(spec, FileSettings)
        return first_remote_output(settings) if settings.is_url else first_output(settings)

    def open_source(self, spec: ConnectorSpec, options: SourceOptions, context: OpenContext) -> Source:
        del context
        return _source(options_of(spec, FileSettings), options)

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        del context
        settings = options_of(spec, FileSettings)
        return open_remote_sink(settings, stream) if settings.is_url else open_file_sink(settings, stream)

    def open_parts(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> PartWriter:
        """Open a writer of parts; the sink must have made the directory."""
        del context
        settings = options_of(spec, FileSettings)
        return open_remote_parts(settings, stream) if settings.is_url else open_file_parts(settings, stream)


def _source(settings: FileSettings, options: SourceOptions) -> FileSource:
    return RemoteFileSource(settings, options) if settings.is_url else FileSource(settings, options)


def _whole(path: str) -> str:
    """A path, however it is spelt."""
    if "://" in path:
        return path.rstrip("/")
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - Path does not remove ".."
