"""Messages whose schema is in a registry: a zero, the id of the schema in four bytes, then the value.

The value is decoded by the schema that wrote it, and encoded by one that the registry has taken. What a value contains is left to a `Codec`
(`avro.messages`, `protobuf.messages`). A message is rejected if it has no such head, if the registry does not have its schema, if that
schema and the columns do not go together, or if its value is not valid. While the registry is away nothing is rejected.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.base import About, needs_package
from fordstone.connectors.messages import MESSAGE_BYTES_MAX, Decoded, MessageFormat, RejectedMessage
from fordstone.connectors.schema_registry import (
    RefusedSchemaError,
    RegisteredSchema,
    SchemaKind,
    SchemaRegistry,
    UnknownSchemaError,
)
from fordstone.errors import ConfigError, FordstoneError
from fordstone.lang.schema import Schema

HEAD_BYTES: Final = 5
_PROTOBUF: Final = About(summary="", guarantee="", extra="protobuf", package="protobuf", modules=("google",))
REJECTED_BYTES_MAX: Final = 3072
"""What is kept of a rejected message, as base64."""
READERS_MAX: Final = 1_000
"""Schemas that readers are kept for."""


class MismatchError(Exception):
    """A schema and the columns that are read do not go together."""


class UnfitError(Exception):
    """A schema has no place for the columns that are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedValues:
    """What values are."""

    frame: pl.DataFrame
    """The rows of the valid ones, in order."""
    good: npt.NDArray[np.int64]
    """Their numbers."""
    failed: dict[int, str]
    """Of the others, why."""


ReadValues = Callable[[Sequence[bytes]], DecodedValues]
WriteValues = Callable[[pl.DataFrame, bytes], list[bytes]]
"""Makes one message per row, each with these bytes first. Raises `ValueError` for a row that the schema has no value for."""


class Codec(ABC):
    """What values contain, for some columns."""

    kind: SchemaKind

    @abstractmethod
    def reader(self, schema: RegisteredSchema) -> ReadValues:
        """Return what reads values that a schema wrote. Raises `MismatchError`, or `ValueError` for a text that is no schema."""

    @abstractmethod
    def schema_text(self, subject: str, latest: RegisteredSchema | None) -> str:
        """Return the schema to be registered. Raises `ValueError` or `UnfitError` if the columns have none.

        `latest`: the newest one of the subject, whose name the new one needs in order to be compatible with it.
        """

    @abstractmethod
    def writer(self, schema: RegisteredSchema) -> WriteValues:
        """Return what writes values by a schema. Raises `UnfitError`, or `ValueError` for a text that is no schema."""


class RegisteredMessages(MessageFormat):
    """Messages of one subject."""

    def __init__(
        self,
        codec: Codec,
        schema: Schema,
        registry: SchemaRegistry,
        *,
        subject: str,
        auto_register: bool,
        where: str,
        fails: Callable[[str], FordstoneError],
    ) -> None:
        self._codec = codec
        self._schema = schema
        self._registry = registry
        self._subject = subject
        self._auto_register = auto_register
        self._where = where
        self._fails = fails
        self._readers: dict[int, ReadValues | str] = {}
        self._writer: tuple[bytes, WriteValues] | None = None

    def decode(self, values: Sequence[bytes]) -> Decoded:
        """Raises `RegistryAwayError` if a schema is needed that is not known yet."""
        ids = _schema_ids(values)
        rejected: list[RejectedMessage] = []
        frames: list[pl.DataFrame] = []
        numbers: list[npt.NDArray[np.int64]] = []
        readers = {one: self._reader(one) for one in np.unique(ids).tolist()}
        for one, read in readers.items():
            which = np.flatnonzero(ids == one).tolist()
            if isinstance(read, str):
                rejected += [_rejected(number, values[number], read) for number in which]
                continue
            found = read([values[number][HEAD_BYTES:] for number in which])
            rejected += [
                _rejected(which[number], values[which[number]], f"schema id {one}: {why}")
                for number, why in found.failed.items()
            ]
            frames.append(found.frame)
            numbers.append(np.array(which, dtype=np.int64)[found.good])
        if len(frames) == 1:
            frame, order = frames[0], numbers[0]
        else:
            order = np.concatenate([np.zeros(0, np.int64), *numbers])
            places = np.argsort(order)
            frame, order = pl.concat([self._schema.empty(), *frames])[places], order[places]
        rejected.sort(key=lambda one: one.number)
        return Decoded(frame=frame, numbers=order, rejected=tuple(rejected))

    def encode(self, frame: pl.DataFrame) -> list[bytes]:
        """Raises `RegistryAwayError` if the schema could not be registered yet."""
        self.prepare()
        if self._writer is None:
            raise AssertionError("nothing was prepared")
        head, write = self._writer
        try:
            return write(frame, head)
        except ValueError as error:
            raise self._fails(f"{self._where}: {error}. Nothing of these rows was written.") from error

    def prepare(self) -> None:
        """Find or register the schema that values are written by."""
        if self._writer is not None:
            return
        try:
            schema = self._registered() if self._auto_register else self._latest()
            head = b"\0" + schema.id.to_bytes(4, "big")
            self._writer = (head, self._codec.writer(schema))
        except UnfitError as error:
            raise self._fails(
                f"{self._where}: the columns do not fit the schema of {self._subject!r}: {error}.\n"
                "Select and cast the columns before the sink as the schema has them."
            ) from error
        except ValueError as error:
            raise ConfigError(f"{self._where}: {error}.") from error

    def close(self) -> None:
        self._registry.close()

    def _registered(self) -> RegisteredSchema:
        try:
            latest = self._registry.latest(self._subject)
        except UnknownSchemaError:
            latest = None
        text = self._codec.schema_text(self._subject, latest)
        try:
            schema_id = self._registry.register(self._subject, self._codec.kind, text)
        except RefusedSchemaError as error:
            raise self._fails(
                f"{self._where}: the schema registry does not take the schema of these columns as a new version of {self._subject!r}: {error}\n"
                "Nothing was written. Change the columns so that readers of earlier versions can read them, write to another topic, or change the "
                f"compatibility level of the subject. The schema is: {text}"
            ) from error
        return RegisteredSchema(id=schema_id, kind=self._codec.kind, text=text, references={})

    def _latest(self) -> RegisteredSchema:
        try:
            schema = self._registry.latest(self._subject)
        except UnknownSchemaError as error:
            raise self._fails(
                f"{self._where}: the schema registry at {self._registry.options.url} has no subject {self._subject!r}, and auto_register=False.\n"
                "Register its schema, name another subject=, or leave auto_register=False out."
            ) from error
        if schema.kind != self._codec.kind:
            raise self._fails(
                f"{self._where}: {self._subject!r} has a schema of {schema.kind}, not {self._codec.kind}."
            )
        return schema

    def _reader(self, schema_id: int) -> ReadValues | str:
        """What reads the messages of an id, or why nothing can."""
        if schema_id > _ID_MAX:
            return f"schema id {schema_id}: no registry gives this number"
        if schema_id < 0:
            return _NO_HEAD if schema_id == _HEADLESS else f"the message has more than {MESSAGE_BYTES_MAX:,} bytes"
        known = self._readers.get(schema_id)
        if known is not None:
            return known
        try:
            schema = self._registry.schema(schema_id)
        except UnknownSchemaError:
            return f"schema id {schema_id}: the schema registry at {self._registry.options.url} does not have it"
        found: ReadValues | str = f"schema id {schema_id}: it is a schema of {schema.kind}, not {self._codec.kind}"
        if schema.kind == self._codec.kind:
            try:
                found = self._codec.reader(schema)
            except (MismatchError, ValueError) as error:
                found = f"schema id {schema_id}: {error}"
        if len(self._readers) >= READERS_MAX:
            self._readers.clear()
        self._readers[schema_id] = found
        return found


_ID_MAX: Final = (1 << 31) - 1
_HEADLESS: Final = -1
_TOO_LONG: Final = -2
_NO_HEAD: Final = (
    "the message does not begin with a zero and the id of a schema: its producer did not use a schema registry"
)


def _schema_ids(values: Sequence[bytes]) -> npt.NDArray[np.int64]:
    heads = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), dtype=np.uint8)
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    if len(heads) == HEAD_BYTES * len(values) and not (lengths > MESSAGE_BYTES_MAX).any():
        table = heads.reshape(-1, HEAD_BYTES)
        if not table[:, 0].any():
            return np.ascontiguousarray(table[:, 1:]).view(">u4").reshape(-1).astype(np.int64)
    return np.fromiter(map(_schema_id, values), dtype=np.int64, count=len(values))


def _schema_id(value: bytes) -> int:
    if len(value) > MESSAGE_BYTES_MAX:
        return _TOO_LONG
    if len(value) < HEAD_BYTES or value[0]:
        return _HEADLESS
    return int.from_bytes(value[1:HEAD_BYTES], "big")


def _rejected(number: int, value: bytes, reason: str) -> RejectedMessage:
    text = base64.b64encode(value[:REJECTED_BYTES_MAX]).decode()
    return RejectedMessage(number=number, text=text, reason=reason)


def codec(name: str, schema: Schema, text: str | None, *, message: str | None, where: str) -> Codec:
    """Return the codec of a format. `text`: a schema that the user gives; `message`: its message that rows are."""
    if name == "avro":
        from fordstone.connectors.avro.messages import AvroCodec  # noqa: PLC0415 - it imports this module

        return AvroCodec(schema, text, where=where)
    with needs_package(_PROTOBUF, where=f"{where}: format='protobuf'"):
        from fordstone.connectors.protobuf.messages import ProtobufCodec  # noqa: PLC0415 - comes with an extra
    return ProtobufCodec(schema, text, message=message, where=where)
