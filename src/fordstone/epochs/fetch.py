"""Fetch checkpoints from remote storage into the local store.

`survey_remote` gathers the facts that `protocol.recovery` judges beside the local ones; `fetch_checkpoint` carries out
what it decided. `upload` puts them there.

Invariants: every byte is checked before it is stored; the local manifest is written last; cuts at the remote are of
sealed epochs only.
"""

from __future__ import annotations

import contextlib

from fordstone.epochs.cut_log import parse_cut_log
from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.run_file import run_problem, short
from fordstone.epochs.sealed import decode_manifest, epoch_name, parse_epoch_name
from fordstone.epochs.store import CheckpointStore
from fordstone.epochs.survey import Survey
from fordstone.errors import CheckpointError, DamagedError
from fordstone.protocol.recovery import CheckpointFact
from fordstone.state.base import RunRef
from fordstone.storage.remote import Remote, open_remote


def survey_remote(url: str | Remote, store: CheckpointStore, *, deep: bool = False) -> Survey:
    """The facts about the remote copies of this store's pipeline and node. `deep` reads every run.

    `StorageError` if the remote does not answer: whether to go on without it is the caller's to decide.
    """
    copies = _Copies(url, store)
    there = copies.run_sizes()
    cuts = set(copies.cuts())
    facts = []
    for epoch in copies.epochs():
        problem: str | None = None
        try:
            runs = copies.manifest(epoch).runs()
        except DamagedError as error:
            problem = str(error)
        else:
            cuts.add(epoch)
            for run in dict.fromkeys(runs):
                problem = problem or (copies.run_fault(run) if deep else _size_fault(run, there))
        facts.append(CheckpointFact(epoch=epoch, where="remote", problem=problem))
    return Survey(checkpoints=tuple(facts), cuts=frozenset(cuts))


def fetch_checkpoint(url: str | Remote, store: CheckpointStore, epoch: int | None = None) -> Manifest:
    """Bring one checkpoint, or the newest that is whole, into the local store, with the cuts that are there.

    Only runs that are not stored here, or are damaged here, are fetched. `CheckpointError` says why none could be had.
    """
    copies = _Copies(url, store)
    epochs = copies.epochs()[::-1] if epoch is None else (epoch,)
    problems = []
    for number in epochs:
        try:
            manifest = copies.manifest(number)
            for run in dict.fromkeys(manifest.runs()):
                if store.run_fault(run, deep=True) is not None:
                    store.put_run(run, copies.run(run))
        except DamagedError as error:
            problems.append(f"  checkpoint {number}: {error}")
            continue
        store.add_cuts([*copies.cuts().values(), manifest.cut])
        store.commit(manifest, rebuilt=True)
        return manifest
    found = "\n".join(problems) or "  there is none"
    raise CheckpointError(
        f"no whole checkpoint of pipeline {store.pipeline} on node {store.node} could be fetched:\n{found}\n"
        f"Check the URL and the name of the node."
    )


class _Copies:
    """The files of one pipeline and node at a remote."""

    def __init__(self, url: str | Remote, store: CheckpointStore) -> None:
        self._remote = open_remote(url) if isinstance(url, str) else url
        self._pipeline, self._node = store.pipeline, store.node
        self._base = f"{store.pipeline}/{store.node}"

    def epochs(self) -> tuple[int, ...]:
        """The epochs with a manifest, oldest first."""
        names = self._remote.sizes(f"{self._base}/manifests")
        return tuple(sorted(epoch for name in names if (epoch := parse_epoch_name(name))))

    def run_sizes(self) -> dict[str, int]:
        """The runs that are there."""
        return self._remote.sizes(f"{self._base}/runs")

    def manifest(self, epoch: int) -> Manifest:
        """One manifest, checked."""
        data = self._get(f"manifests/{epoch_name(epoch)}")
        return decode_manifest(data, pipeline=self._pipeline, node=self._node, epoch=epoch)

    def run(self, ref: RunRef) -> bytes:
        """The bytes of one run, unchecked."""
        return self._get(f"runs/{ref.digest}")

    def run_fault(self, ref: RunRef) -> str | None:
        """What is wrong with a run, after reading all of it."""
        try:
            problem = run_problem(self.run(ref), ref)
        except DamagedError as error:
            return str(error)
        return f"run {short(ref.digest)} {problem}" if problem else None

    def cuts(self) -> dict[int, Cut]:
        """Every cut that can be read."""
        cuts: dict[int, Cut] = {}
        for name in sorted(self._remote.sizes(f"{self._base}/cuts")):
            if parse_epoch_name(name, ".jsonl") is not None:
                with contextlib.suppress(DamagedError):
                    cuts |= parse_cut_log(self._get(f"cuts/{name}")).cuts
        return cuts

    def _get(self, path: str) -> bytes:
        try:
            return self._remote.get(f"{self._base}/{path}")
        except FileNotFoundError as error:
            raise DamagedError(f"{path} is missing at the remote") from error


def _size_fault(run: RunRef, there: dict[str, int]) -> str | None:
    if run.digest not in there:
        return f"run {short(run.digest)} is missing at the remote"
    if there[run.digest] != run.size_bytes:
        return (
            f"run {short(run.digest)} has {there[run.digest]} bytes at the remote, the manifest says {run.size_bytes}"
        )
    return None
