"""Reads .proto texts, as registries keep them, into descriptors that the package `protobuf` takes.

What it does not read is passed: options, services, extensions, reserved numbers. Names of types are resolved by that package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from google.protobuf import (
    any_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    struct_pb2,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf.descriptor import FileDescriptor

TEXT_CHARS_MAX: Final = 1 << 20
DEPTH_MAX: Final = 32
MAIN: Final = "fordstone_value.proto"
_TOKEN: Final = re.compile(
    r"\s+|//[^\n]*|/\*.*?\*/|(?P<word>\.?[A-Za-z_][\w.]*)|(?P<number>-?(?:0[xX][0-9a-fA-F]+|[\d.]+(?:[eE][+-]?\d+)?|inf|nan))"
    r"|(?P<text>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*')|(?P<mark>[{}()\[\]<>=;,:+-])",
    re.DOTALL,
)
_Field = descriptor_pb2.FieldDescriptorProto
_PLAIN: Final = {
    name: _Field.Type.Value(f"TYPE_{name.upper()}")
    for name in (
        *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64"),
        *("sfixed32", "sfixed64", "bool", "string", "bytes"),
    )
}
_LABELS: Final = {
    "optional": _Field.LABEL_OPTIONAL,
    "required": _Field.LABEL_REQUIRED,
    "repeated": _Field.LABEL_REPEATED,
}
_WELL_KNOWN: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        field_mask_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )
}
_KNOWN: Final = {
    "google/type/date.proto": 'syntax = "proto3"; package google.type; message Date { int32 year = 1; int32 month = 2; int32 day = 3; }',
    "confluent/type/decimal.proto": 'syntax = "proto3"; package confluent.type; '
    "message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }",
    "confluent/meta.proto": 'syntax = "proto3"; package confluent;',
}
"""Files that registries have by themselves; of `meta.proto`, only options are used."""


class ProtoError(ValueError):
    """A text that is no .proto file, or that uses what is not there."""


def file_of(text: str, references: Mapping[str, str]) -> FileDescriptor:
    """Return the description of a text. `references`: the texts of other files by the name they are imported by, used ones first."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    try:
        for name, other in references.items():
            _add(pool, _parsed(other, name), added)
        return _add(pool, _parsed(text, MAIN), added)
    except (TypeError, KeyError) as error:
        raise ProtoError(f"the schema is not valid: {error}") from error


def _add(
    pool: descriptor_pool.DescriptorPool, file: descriptor_pb2.FileDescriptorProto, added: set[str]
) -> FileDescriptor:
    for name in file.dependency:
        if name in added:
            continue
        if name in _WELL_KNOWN:
            known = descriptor_pb2.FileDescriptorProto()
            _WELL_KNOWN[name].CopyToProto(known)
            _add(pool, known, added)
        elif name in _KNOWN:
            _add(pool, _parsed(_KNOWN[name], name), added)
        else:
            raise ProtoError(f"the schema imports {name!r}, which the registry does not have as a reference of it")
    added.add(file.name)
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


def _parsed(text: str, name: str) -> descriptor_pb2.FileDescriptorProto:
    if len(text) > TEXT_CHARS_MAX:
        raise ProtoError(f"the schema has {len(text):,} characters, and may have {TEXT_CHARS_MAX:,}")
    return _Reader(text, name).file()


class _Reader:
    """Reads one text from left to right."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.end() == at:
                raise ProtoError(f"the schema is no .proto text: {text[at : at + 40]!r} was not expected")
            if found.lastgroup is not None:
                self._tokens.append((found.lastgroup, found[0]))
            at = found.end()
        self._at = 0
        self._proto3 = False

    def file(self) -> descriptor_pb2.FileDescriptorProto:
        file = descriptor_pb2.FileDescriptorProto(name=self._name)
        while self._at < len(self._tokens):
            word = self._next()
            if word in {"syntax", "edition"}:
                self._expect("=")
                self._syntax(file, word, self._text())
                self._expect(";")
            elif word == "package":
                file.package = self._next()
                self._expect(";")
            elif word == "import":
                if self._peek() in {"public", "weak", "option"}:
                    self._next()
                file.dependency.append(self._text())
                self._expect(";")
            elif word == "message":
                self._message(file.message_type.add(), 0)
            elif word == "enum":
                self._enum(file.enum_type.add())
            elif word != ";":
                self._pass()
        return file

    def _syntax(self, file: descriptor_pb2.FileDescriptorProto, word: str, said: str) -> None:
        if word == "syntax" and said in {"proto2", "proto3"}:
            file.syntax, self._proto3 = said, said == "proto3"
            return
        known = descriptor_pb2.Edition.keys()
        if word == "syntax" or f"EDITION_{said}" not in known:
            raise ProtoError(f"{word} {said!r} is not known")
        file.syntax, file.edition = "editions", descriptor_pb2.Edition.Value(f"EDITION_{said}")

    def _message(self, message: descriptor_pb2.DescriptorProto, depth: int) -> None:  # noqa: C901, PLR0912 - one case per statement
        if depth > DEPTH_MAX:
            raise ProtoError(f"the schema is nested more than {DEPTH_MAX} deep")
        message.name = self._next()
        self._expect("{")
        alone: list[descriptor_pb2.FieldDescriptorProto] = []
        while (word := self._next()) != "}":
            if word == "message":
                self._message(message.nested_type.add(), depth + 1)
            elif word == "enum":
                self._enum(message.enum_type.add())
            elif word == "oneof":
                message.oneof_decl.add().name = self._next()
                self._expect("{")
                while (inner := self._next()) != "}":
                    if inner == "option":
                        self._pass()
                    elif inner != ";":
                        self._field(message, inner, None).oneof_index = len(message.oneof_decl) - 1
            elif word == "map" and self._peek() == "<":
                self._map(message)
            elif word in _LABELS:
                field = self._field(message, self._next(), word)
                if word == "optional" and self._proto3:
                    alone.append(field)
            elif word in {"option", "reserved", "extensions", "extend"}:
                self._pass()
            elif word != ";":
                self._field(message, word, None)
        for field in alone:  # they come after those that are in the text
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add().name = f"_{field.name}"

    def _field(
        self, message: descriptor_pb2.DescriptorProto, kind: str, label: str | None
    ) -> descriptor_pb2.FieldDescriptorProto:
        if kind == "group":
            raise ProtoError(f"{message.name} has a group, which is not read")
        field = message.field.add(label=_LABELS[label or "optional"])
        _set_type(field, kind)
        field.name = self._next()
        self._number(field)
        return field

    def _map(self, message: descriptor_pb2.DescriptorProto) -> None:
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        name = self._next()
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        for number, (part, kind) in enumerate((("key", key), ("value", value)), 1):
            _set_type(entry.field.add(name=part, number=number, label=_Field.LABEL_OPTIONAL), kind)
        field = message.field.add(name=name, label=_Field.LABEL_REPEATED, type_name=entry.name)
        self._number(field)

    def _number(self, field: descriptor_pb2.FieldDescriptorProto) -> None:
        self._expect("=")
        field.number = self._whole()
        if self._peek() == "[":
            self._pass_to("]")
        self._expect(";")

    def _enum(self, enum: descriptor_pb2.EnumDescriptorProto) -> None:
        enum.name = self._next()
        self._expect("{")
        while (word := self._next()) != "}":
            if word in {"option", "reserved"} and self._peek() != "=":
                self._pass()
            elif word != ";":
                self._expect("=")
                enum.value.add(name=word, number=self._whole())
                enum.options.allow_alias = len({one.number for one in enum.value}) < len(enum.value)
                if self._peek() == "[":
                    self._pass_to("]")
                self._expect(";")
        if not enum.options.allow_alias:
            enum.ClearField("options")

    # Tokens.

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise ProtoError("the schema ends too early")
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _expect(self, mark: str) -> None:
        found = self._next()
        if found != mark:
            raise ProtoError(f"the schema has {found!r} where {mark!r} was expected")

    def _text(self) -> str:
        return self._next()[1:-1]

    def _whole(self) -> int:
        found = self._next()
        try:
            return int(self._next() if found == "+" else found, 0)
        except ValueError as error:
            raise ProtoError(f"the schema has {found!r} where a number was expected") from error

    def _pass(self) -> None:
        """Pass a statement: up to its semicolon, or the end of its block."""
        while (found := self._next()) != ";":
            if found == "{":
                self._at -= 1
                self._pass_to("}")
                if self._peek() != ";":
                    return

    def _pass_to(self, end: str) -> None:
        begin, depth = self._peek(), 0
        while True:
            found = self._next()
            depth += (found == begin) - (found == end)
            if not depth:
                return


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _PLAIN:
        field.type = _PLAIN[kind]
    else:
        field.type_name = kind
