"""What the log records about blobs: sizes, references, and the content of small ones.

A file, or an object in a store, costs two syncs or a round trip; a row costs a share of a sync that happens anyway. Most
blobs that nodes send are small, so keeping them in the log decides how many nodes a hub can serve. Readers that access the
blob store directly do not find them there, and ask the hub.

Invariants: a blob with references is never removed, and nothing references a blob that is not stored whole, in the log
or in the blob store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from fordstone.hub.store.base import LogReader
from fordstone.hub.store.log import Transaction
from fordstone.state.base import RunRef

SMALL_BYTES_MAX: Final = 16 << 10


def missing_blobs(log: LogReader, runs: Sequence[RunRef]) -> set[str]:
    """Return which of these blobs are not stored with exactly this size."""
    wanted = {run.digest: run.size_bytes for run in runs}
    ambiguous = {run.digest for run in runs if wanted[run.digest] != run.size_bytes}
    sizes = log.blob_sizes(wanted)
    return ambiguous | {digest for digest, size_bytes in wanted.items() if sizes.get(digest) != size_bytes}


def count_references(runs: Iterable[RunRef]) -> Counter[str]:
    """Count the references to each blob."""
    return Counter(run.digest for run in runs)


def save_small(tx: Transaction, digest: str, data: bytes) -> bool:
    """Keep a verified blob; False if it was stored already. Its grace time begins again."""
    if tx.log.blob_sizes((digest,)).get(digest) == len(data):
        tx.log.touch_blob(digest, now_us=tx.now_us)
        return False
    tx.log.save_small_blob(digest, data, now_us=tx.now_us)
    return True
