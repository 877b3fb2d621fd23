"""Values of messages in Avro, by schemas of a registry."""

from __future__ import annotations

from contextlib import suppress

from fordstone.connectors.avro.decode import Decoder
from fordstone.connectors.avro.encode import Encoder
from fordstone.connectors.avro.schema import AvroSchemaError, parse, record_name, schema_of
from fordstone.connectors.registered import Codec, ReadValues, WriteValues
from fordstone.connectors.schema_registry import RegisteredSchema, SchemaKind
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema


class AvroCodec(Codec):
    """Values of some columns."""

    kind: SchemaKind = "AVRO"

    def __init__(self, schema: Schema, text: str | None, *, where: str) -> None:
        """`text`: the schema that rows are read as, and written by."""
        self._schema = schema
        self._text = text
        try:
            self._reader = None if text is None else parse(text)
        except AvroSchemaError as error:
            raise ConfigError(f"{where}: schema=...: {error}.") from error

    def reader(self, schema: RegisteredSchema) -> ReadValues:
        return Decoder(parse(schema.text, schema.references.values()), self._schema, self._reader).decode

    def schema_text(self, subject: str, latest: RegisteredSchema | None) -> str:
        if self._text is not None:
            return self._text
        name = ""
        if latest is not None and latest.kind == self.kind:
            with suppress(AvroSchemaError):
                name = parse(latest.text, latest.references.values()).full_name
        return schema_of(self._schema, name or record_name(subject))

    def writer(self, schema: RegisteredSchema) -> WriteValues:
        return Encoder(parse(schema.text, schema.references.values()), self._schema).encode
