"""A real HDFS: one NameNode and one DataNode, each a Java process that can be ended by itself."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from itertools import count
from pathlib import Path
from typing import Final

from tests.services.base import MissingServiceError, Server, free_port, maven_jars

VERSION: Final = "3.5.0"
"""The same as of the client inside PySpark."""
FORMAT_TIMEOUT_S: Final = 90.0
HTTP_TIMEOUT_S: Final = 5.0
BLOCK_BYTES: Final = 1 << 20
"""Small, so that a file of a test has several blocks."""


def jars() -> Path:
    """Return the folder with the jars of both servers."""
    names = ("hadoop-common", "hadoop-hdfs", "hadoop-hdfs-client")
    return maven_jars(f"hadoop-{VERSION}", [f"org.apache.hadoop:{name}:{VERSION}" for name in names], transitive=True)


def java() -> Path:
    """Return the program `java` that Spark would use."""
    from fordstone.errors import NotInstalledError
    from fordstone.spark.session.java import home

    try:
        return home(os.environ) / "bin" / "java"
    except NotInstalledError as error:
        raise MissingServiceError(str(error)) from error


class Hdfs:
    """Both servers, with their data in one folder."""

    def __init__(self, folder: Path) -> None:
        self.port, self._http = free_port(), free_port()
        self._conf = folder / "conf"
        for webapp in ("hdfs", "datanode"):
            (self._conf / "webapps" / webapp).mkdir(parents=True)
        (self._conf / "core-site.xml").write_text(_xml({"fs.defaultFS": self.address}))
        (self._conf / "hdfs-site.xml").write_text(_xml(self._settings(folder)))
        self._java: list[str | Path] = [java(), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        self._java += ["-cp", f"{self._conf}:{jars()}/*"]
        self._format()
        self.name_node = Server(
            "NameNode",
            [*self._java, "org.apache.hadoop.hdfs.server.namenode.NameNode"],
            log=folder / "namenode.log",
            answers=lambda: bool(self._bean("NameNodeInfo")),
        )
        self.data_node = Server(
            "DataNode",
            [*self._java, "org.apache.hadoop.hdfs.server.datanode.DataNode"],
            log=folder / "datanode.log",
            answers=self._is_ready,
        )
        self._numbers = count(1)

    @property
    def address(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def directory(self) -> str:
        """Return the URL of a directory that nothing has used."""
        return f"{self.address}/dir{next(self._numbers)}"

    def start(self) -> None:
        """Start both, and wait until files can be written."""
        self.name_node.start()
        self.data_node.start()

    def stop(self) -> None:
        self.data_node.stop()
        self.name_node.stop()

    def admin(self, *arguments: str) -> str:
        """Run `hdfs dfsadmin` and return its output."""
        done = subprocess.run(
            [*self._java, "org.apache.hadoop.hdfs.tools.DFSAdmin", *arguments],
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=True,
        )
        return done.stdout

    def _settings(self, folder: Path) -> dict[str, str]:
        return {
            "dfs.replication": "1",
            "dfs.blocksize": str(BLOCK_BYTES),
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.datanode.data.dir": f"file://{folder}/blocks",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            # The same after a restart.
            "dfs.datanode.address": f"127.0.0.1:{free_port()}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{free_port()}",
            "dfs.datanode.http.address": "127.0.0.1:0",
            "dfs.namenode.fs-limits.min-block-size": "1024",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            # A DataNode that was killed is noticed, and a new one taken, within the time of a test.
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "2000",
            "dfs.client.block.write.locateFollowingBlock.initial.delay.ms": "20",
        }

    def _format(self) -> None:
        done = subprocess.run(
            [*self._java, "org.apache.hadoop.hdfs.server.namenode.NameNode", "-format", "-force", "-nonInteractive"],
            capture_output=True,
            text=True,
            timeout=FORMAT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the NameNode could not be formatted:\n{done.stderr[-2000:]}")

    def _is_ready(self) -> bool:
        state = self._bean("FSNamesystemState")
        return state["NumLiveDataNodes"] == 1 and state["FSState"] == "Operational"

    def _bean(self, name: str) -> dict[str, object]:
        address = f"http://127.0.0.1:{self._http}/jmx?qry=Hadoop:service=NameNode,name={name}"
        with urllib.request.urlopen(address, timeout=HTTP_TIMEOUT_S) as response:
            beans: list[dict[str, object]] = json.load(response)["beans"]
        return beans[0] if beans else {}


def _xml(settings: dict[str, str]) -> str:
    properties = "".join(
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
    )
    return f"<configuration>{properties}</configuration>\n"


def started(folder: Path) -> Hdfs:
    server = Hdfs(folder)
    server.start()
    return server
