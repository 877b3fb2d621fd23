"""A real HDFS: a NameNode and two DataNodes, each a Java process that can be ended by itself."""

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
DATA_NODES: Final = 2
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
    """All servers, with their data in one folder.

    There are two DataNodes because a file of one replica takes half a second to close: the driver of this project asks the NameNode before
    the DataNode has reported the last block, and then waits for that long. Of two, the second in line has reported by then.
    """

    def __init__(self, folder: Path) -> None:
        self.port, self._http = free_port(), free_port()
        self._conf = folder / "conf"
        for webapp in ("hdfs", "datanode"):
            (self._conf / "webapps" / webapp).mkdir(parents=True)
        (self._conf / "core-site.xml").write_text(_xml({"fs.defaultFS": self.address}))
        (self._conf / "hdfs-site.xml").write_text(_xml(self._settings(folder)))
        self._java: list[str | Path] = [java(), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        self._java += ["-Dn=0", "-Ddata=0", "-Dipc=0", "-cp", f"{self._conf}:{jars()}/*"]
        self._format()
        self.name_node = Server(
            "NameNode",
            [*self._java, "org.apache.hadoop.hdfs.server.namenode.NameNode"],
            log=folder / "namenode.log",
            answers=lambda: bool(self._bean("NameNodeInfo")),
        )
        self.data_nodes = [self._data_node(folder, number) for number in range(1, DATA_NODES + 1)]
        self._numbers = count(1)

    @property
    def address(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def directory(self) -> str:
        """Return the URL of a directory that nothing has used."""
        return f"{self.address}/dir{next(self._numbers)}"

    def start(self) -> None:
        """Start all, and wait until files can be written."""
        for server in self._servers:
            server.launch()
        self.wait()

    def wait(self) -> None:
        """Wait until files can be written."""
        for server in self._servers:
            server.wait()

    def stop(self) -> None:
        for server in self._servers:
            server.stop()

    @property
    def _servers(self) -> list[Server]:
        return [self.name_node, *self.data_nodes]

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

    def _data_node(self, folder: Path, number: int) -> Server:
        # In place of those that all have; the settings refer to them. Ports stay the same after a restart.
        properties = [
            f"-D{name}={value}" for name, value in (("n", number), ("data", free_port()), ("ipc", free_port()))
        ]
        return Server(
            f"DataNode {number}",
            [*self._java, *properties, "org.apache.hadoop.hdfs.server.datanode.DataNode"],
            log=folder / f"datanode-{number}.log",
            answers=self._is_ready,
        )

    def _settings(self, folder: Path) -> dict[str, str]:
        return {
            "dfs.replication": str(DATA_NODES),
            "dfs.blocksize": str(BLOCK_BYTES),
            "dfs.namenode.name.dir": f"file://{folder}/name",
            "dfs.datanode.data.dir": f"file://{folder}/blocks-${{n}}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http}",
            "dfs.datanode.address": "127.0.0.1:${data}",
            "dfs.datanode.ipc.address": "127.0.0.1:${ipc}",
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
        return state["NumLiveDataNodes"] == DATA_NODES and state["FSState"] == "Operational"

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
