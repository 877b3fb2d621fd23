"""A Redis server that forgets nothing when it is killed: it writes each change to disk before it confirms it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tests.services.base import Server, debian_root, free_port, library_path, listens

NAME = "redis-7.0.15"


class RedisServer(Server):
    """Listens on `port`, which stays when it is started again."""

    def __init__(self, *options: str, durable: bool = True, tls: tuple[Path, Path, Path] | None = None) -> None:
        """`durable=False`: forgets all when it is killed. `tls`: a certificate, its key, and the authority of clients. Then it takes clients of this
        authority, and nothing else."""
        root = debian_root(NAME, ["redis-server"])
        self._folder = tempfile.TemporaryDirectory(prefix="fordstone-redis-")
        folder = Path(self._folder.name)
        self.port = free_port()
        self._tls = tls
        ports = ["--port", str(self.port)]
        if tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port)]
            ports += ["--tls-cert-file", str(tls[0]), "--tls-key-file", str(tls[1]), "--tls-ca-cert-file", str(tls[2])]
        durability = ["--appendonly", "yes", "--appendfsync", "always"] if durable else []
        super().__init__(
            "redis-server",
            [
                root / "usr/bin/redis-server",
                *(*ports, "--bind", "127.0.0.1", "--dir", str(folder)),
                *("--save", "", "--daemonize", "no", *durability, *options),
            ],
            log=folder / "log",
            answers=self._is_up,
            env=library_path(root),
        )
        self.start()

    @property
    def url(self) -> str:
        return f"redis{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def client(self, **given: Any) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, retry=Retry(NoBackoff(), 0), **given)

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    def _is_up(self) -> bool:
        if self._tls:
            return listens(self.port)
        try:
            with self.client(socket_timeout=1.0) as client:
                return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except redis.RedisError as error:
            raise ConnectionError(str(error)) from error
