"""Kinds of stores: for each scheme of a URL its package, the options of its driver, and how a file appears whole there.

The only module that imports fsspec and its drivers, when the first URL needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from importlib import import_module
from typing import Any, Final

from fordstone.errors import ConfigError
from fordstone.storage.remote.errors import StoreAwayError, reason

S3_OPTIONS: Final[Mapping[str, Any]] = {
    "use_listings_cache": False,
    "config_kwargs": {"connect_timeout": 5, "read_timeout": 10, "retries": {"mode": "standard", "max_attempts": 3}},
}
"""Three attempts with growing waits and jitter, also when the store answers 503 or SlowDown."""
S3_TRIES: Final = 2
"""Of s3fs itself, around the three attempts: for a response that is cut."""
S3_PART_BYTES: Final = 8 << 20
"""A file of at least two parts is uploaded in parts: after an error only a part is sent again."""
HDFS_OPTIONS: Final[Mapping[str, Any]] = {"dfs.client.failover.max.attempts": "3"}
"""Attempts to reach a NameNode. By itself the driver makes fifteen, which takes three minutes if nothing listens."""


class Appears(Enum):
    """How a file appears whole in a store."""

    AT_ONCE = auto()
    """With all its content, by one request, under its name: objects."""
    RENAMED = auto()
    """By a rename, which replaces an older file in the same step."""
    ASIDE = auto()
    """By a rename that may not replace one: the older file is renamed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """What is known of the stores of one scheme."""

    install: str = "fsspec documents which package has it"
    appears: Appears = Appears.ASIDE
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the driver, as far as fsspec's own configuration has no others."""
    upload: Mapping[str, Any] = field(default_factory=dict)
    """Of each file that is written."""
    keeps_uploads: bool = False
    """Whether an upload that has begun and not ended stays there, unseen."""
    is_shared: bool = True
    """Whether other processes see the same files."""
    use_instead: str | None = None
    """The scheme to use for commits: with this one a rename onto an existing file does nothing, and reports nothing."""


_S3: Final = StoreKind(
    install="pip install 'fordstone[s3]'",
    appears=Appears.AT_ONCE,
    options=S3_OPTIONS,
    upload={"chunksize": S3_PART_BYTES},
    keeps_uploads=True,
)
_HDFS: Final = StoreKind(install="pip install 'fordstone[hdfs]'", appears=Appears.RENAMED, options=HDFS_OPTIONS)
_WEBHDFS: Final = StoreKind(use_instead="hdfs")
_GOOGLE: Final = StoreKind(install="pip install gcsfs", appears=Appears.AT_ONCE)
_AZURE: Final = StoreKind(install="pip install adlfs", appears=Appears.AT_ONCE)
_OTHER: Final = StoreKind()
KINDS: Final[Mapping[str, StoreKind]] = {
    "s3": _S3,
    "s3a": _S3,
    "hdfs": _HDFS,
    "viewfs": StoreKind(appears=Appears.RENAMED),
    "webhdfs": _WEBHDFS,
    "swebhdfs": _WEBHDFS,
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
    "memory": StoreKind(appears=Appears.AT_ONCE, is_shared=False),
}
"""By scheme. Others are used with care, as what is known of none."""


_HDFS_CLIENTS: Final[dict[int, Any]] = {}
"""Those that fsspec keeps. It forgets them in the child of a fork, and a client that is destroyed there waits for ever for its threads, which the
child does not have: so they are kept here as well."""


def kind_of(filesystem: Any) -> StoreKind:
    """Return the kind of an open file system, by the schemes that it names."""
    named = filesystem.protocol
    schemes = (named,) if isinstance(named, str) else tuple(named)
    return next((KINDS[scheme] for scheme in schemes if scheme in KINDS), _OTHER)


def open_filesystem(url: str, *, kind: str, commits: bool = False) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it. `kind` says in errors what the URL is for.

    `commits`: files are written there that must appear whole. `ConfigError` for a kind of URL where that cannot be had.
    """
    scheme, _, rest = url.partition("://")
    store = KINDS.get(scheme, _OTHER)
    if commits and store.use_instead is not None:
        raise ConfigError(
            f"{kind} {url!r}: {scheme} cannot replace a file in one step, and reports success when it did nothing.\n"
            f"Use {store.use_instead}://{rest} with the port of the NameNode's RPC, and install {KINDS[store.use_instead].install}."
        )
    try:
        from fsspec.config import conf  # noqa: PLC0415 - a process without such URLs does not load it
        from fsspec.core import url_to_fs  # noqa: PLC0415 - as above

        if scheme == "hdfs":
            _use_hdfs_native()
        given = conf.get(scheme, {})
        options = {name: value for name, value in store.options.items() if name not in given}
        filesystem, root = url_to_fs(url, **options)
        if store is _HDFS:
            _HDFS_CLIENTS[id(filesystem)] = filesystem
        if store is _S3:
            filesystem.retries = S3_TRIES
    except OSError as error:
        # Some kinds connect when they are opened.
        raise StoreAwayError(f"{kind} {url!r} cannot be reached: {reason(error)}") from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{kind} {url!r} cannot be opened: {error}.\nInstall what this kind of URL needs: {store.install}."
        ) from error
    return filesystem, str(root)


def _use_hdfs_native() -> None:
    """Use a driver without Java: fsspec's own class for HDFS needs libhdfs and a JVM."""
    import fsspec  # noqa: PLC0415 - as above

    import_module("hdfs_native")
    fsspec.register_implementation("hdfs", "hdfs_native.fsspec.HdfsFileSystem", clobber=True)
