"""Commits that come again: repeated, out of order, after a restart of the hub, with other content, and by who was shut out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
from tests.faults.proxy import Proxy, Sent, proxied
from tests.faults.two_tier import Fleet, Part

from fordstone.hub.messages import Commit, Refusal

EPOCHS = 6
FENCED_CODE = 3


def recorded(fleet: Fleet, proxy: Proxy) -> Part:
    """Run a node through the proxy until the hub has some commits; gives it, running."""
    fleet.feeds["north"].write(120)
    node = fleet.node("north", url=proxy.url)
    fleet.feed_until(node, lambda: len(proxy.commits()) >= EPOCHS, f"{EPOCHS} commits")
    return node


def refusal(answer: tuple[int, bytes]) -> tuple[int, Refusal]:
    return answer[0], msgspec.json.decode(answer[1], type=Refusal)


def test_commits_that_come_again_in_any_order_even_after_a_restart_of_the_hub_change_nothing(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    with Fleet(tmp_path, "north", seed=11) as fleet, proxied(fleet.port) as proxy:
        hub = fleet.hub()
        assert recorded(fleet, proxy).stop().report["outcome"] == "stopped"
        commits, before = proxy.commits(), fleet.crossed()
        assert [proxy.send(one)[0] for one in commits] == [200] * len(commits)
        shuffled = Random(11).sample(commits, len(commits))
        assert [proxy.send(one)[0] for one in shuffled] == [200] * len(commits)
        assert hub.kill().killed
        fleet.hub()
        assert [proxy.send(one)[0] for one in reversed(commits)] == [200] * len(commits)
        # Leases and blobs, too, just as they came.
        others = [one for one in proxy.sent if one.path.startswith("/v1/blobs/") or one.path.endswith("/lease")]
        assert {proxy.send(one)[0] for one in others} == {200}
        assert fleet.crossed() == before
        faults(hub_kills=1, commits_again=3 * len(commits))
        fleet.finish()


def test_a_commit_with_other_content_is_refused_and_says_why(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", seed=12) as fleet, proxied(fleet.port) as proxy:
        fleet.hub()
        recorded(fleet, proxy).stop()
        before = fleet.crossed()
        commits = proxy.commits()
        for one in commits:
            status, why = refusal(proxy.send(one, body=otherwise(one)))
            assert (status, why.error) == (409, "other_content")
            assert "what was committed never changes" in why.message
            assert "give one another id" in why.message
        # An epoch that is to come leaves a gap, whatever it holds.
        last = msgspec.json.decode(commits[-1].body, type=Commit)
        far = msgspec.structs.replace(
            last, epochs=(msgspec.structs.replace(last.epochs[-1], epoch=10_000),), checkpoint=None
        )
        path = commits[-1].path.rpartition("/")[0] + "/10000-10000"
        status, why = refusal(proxy.send(commits[-1], body=msgspec.json.encode(far), path=path))
        assert (status, why.error) == (409, "gap")
        assert why.next_epoch == fleet.head("north") + 1
        assert f"epoch {why.next_epoch} is next" in why.message
        assert fleet.crossed() == before
        faults(commits_refused=len(commits) + 1)
        fleet.finish()


def otherwise(one: Sent) -> bytes:
    """The same epochs, created at another time."""
    body = json.loads(one.body)
    for entry in body["epochs"]:
        entry["created_us"] += 1
    return json.dumps(body).encode()


def test_who_was_shut_out_commits_nothing_more_and_is_told_so(tmp_path: Path, faults: Callable[..., None]) -> None:
    with Fleet(tmp_path, "north", seed=13) as fleet, proxied(fleet.port) as proxy:
        fleet.hub()
        first = recorded(fleet, proxy)
        # Another machine, with the same files to read and nothing else, takes over while the first still runs.
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "in").symlink_to(tmp_path / "north" / "in")
        second = fleet.node("north", "--take-over", at="elsewhere")
        fleet.feed_until(first, lambda: False, "end of who was shut out")
        ended = first.ended()
        assert ended.code == FENCED_CODE, ended.errors
        assert "was taken over by another process. This one stops" in ended.errors
        assert "stays in its state directory" in ended.errors
        again = fleet.node("north", live=False).ended()
        assert "--take-over" in again.errors, again.errors
        assert again.code != 0
        for one in proxy.commits():
            status, why = refusal(proxy.send(one))
            assert (status, why.error) == (412, "stale_generation")
            assert "has taken over from" in why.message
        second.until(lambda: fleet.head("north") > EPOCHS, "commit of who took over")
        assert second.stop().report["progress"]["outbox_epochs"] == 0
        faults(takeovers=1, commits_refused=len(proxy.commits()))
        ended = fleet.node("north", live=False, at="elsewhere").ended()
        assert ended.report["outcome"] == "ended"
        assert fleet.center(live=False).ended().report["outcome"] == "ended"
        fleet.judge_center()
