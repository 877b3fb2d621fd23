from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from tests.faults.forked import Nursery


def test_a_child_with_the_number_of_one_that_ended_is_running(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Path(os.devnull).open("rb") as nothing:
        nursery = Nursery(ours)

        def start() -> int | None:
            theirs.send(json.dumps({"pid": 7}).encode())
            return nursery.start("m", "", folder=tmp_path, environment={}, files=(nothing,) * 3).poll()

        assert start() is None
        theirs.send(json.dumps({"ended": 7, "code": -9}).encode())
        assert nursery.code_of(7, seconds=0) == -9
        assert start() is None
