"""A Mosquitto broker whose sessions and messages survive `kill -9`: it saves every change before it is acknowledged."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.services.base import Server, debian_root, free_port, library_path, listens

NAME = "mosquitto-2.0.11"


class Mosquitto(Server):
    """Listens on `port`. With `passwords` it refuses others."""

    def __init__(
        self,
        *,
        durable: bool = True,
        passwords: dict[str, str] | None = None,
        tls: tuple[Path, Path, Path] | None = None,
    ) -> None:
        """`durable=False`: quick, and forgets all when it is killed. `tls`: certificate, key and authority; clients need a certificate, too."""
        root = debian_root(NAME, ["mosquitto", "mosquitto-clients"])
        environment = library_path(root)
        self._folder = tempfile.TemporaryDirectory(prefix="fordstone-mosquitto-")
        folder = Path(self._folder.name)
        self.port = free_port()
        lines = [
            f"listener {self.port} 127.0.0.1",
            "user root",
            "max_queued_messages 0",
            "max_inflight_messages 1000",
            "max_queued_bytes 0",
        ]
        if durable:
            lines += [
                *("persistence true", f"persistence_location {folder}/"),
                *("autosave_interval 1", "autosave_on_changes true"),
            ]
        if tls is not None:
            certificate, key, authority = tls
            lines += [f"certfile {certificate}", f"keyfile {key}", f"cafile {authority}", "require_certificate true"]
        if passwords is None:
            lines.append("allow_anonymous true")
        else:
            self._write_passwords(folder / "passwords", passwords, root, environment)
            lines += ["allow_anonymous false", f"password_file {folder / 'passwords'}"]
        (folder / "mosquitto.conf").write_text("\n".join(lines) + "\n")
        super().__init__(
            "mosquitto",
            [root / "usr/sbin/mosquitto", "-c", folder / "mosquitto.conf"],
            log=folder / "log",
            answers=lambda: listens(self.port),
            env=environment,
        )
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()

    @staticmethod
    def _write_passwords(path: Path, passwords: dict[str, str], root: Path, environment: dict[str, str]) -> None:
        import subprocess

        path.write_text("".join(f"{user}:{password}\n" for user, password in passwords.items()))
        subprocess.run([root / "usr/bin/mosquitto_passwd", "-U", path], env=environment, check=True, timeout=60)
