"""Bundles in an object store (S3, Google Cloud Storage, Azure), with a cache on this machine's disk.

    <prefix>/files/<sha256>                 the files of all versions, each content once
    <prefix>/versions/<version>.json        a version's manifest, written after its files: a version is visible whole or
                                            not at all
    <prefix>/hidden/<version>               an empty object: the version is being deleted and counts as absent
    <prefix>/names/<name>.json              the record of a name, changed by a conditional write (`If-Match` on the
    ETag)
    <prefix>/lock                           the process that prunes or finishes a publication; empty if free. Taken by a
                                            conditional write, also from a holder that has not renewed it for two
                                            minutes

    <cache>/files/<sha256>                  downloaded once, verified by hash
    <cache>/parts/<sha256>.<pid>.<thread>   a download in progress, or of a killed process: the next one resumes it
    <cache>/versions/<version>/             links to these files (see cache.py)
    <cache>/manifests/<version>/            manifest and optional report of a version that was only described
    <cache>/names/<name>.json               the record as it was last read

While the store is unavailable, cached versions open as before and a name's last record is read from the cache: loaded
versions keep serving, and a process that starts meanwhile serves the cached versions. Publishing and moving names
require the store. obstore is imported when a store is opened. Credentials come from the usual environment variables of
each service, or from the machine's role.
"""

import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import structlog

from models.documents import MAX_BYTES, is_version
from models.errors import BundleCorrupt, BundleNotFound, ConfigError, StoreUnavailable
from models.files import file_sha256, rename_durably, write_durably
from models.registry.bundle import REPORT, hashes, open_bundle
from models.registry.manifest import MANIFEST, decode_manifest
from models.registry.name_record import is_name
from models.registry.storage.cache import VersionCache, VersionHold
from models.registry.storage.port import OpenedFolder, StoredRecord

log = structlog.get_logger()

_PERMISSIONS = {
    "s3": "s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and s3:DeleteObject on its objects",
    "gs": "the role Storage Object User on the bucket",
    "az": "the role Storage Blob Data Contributor on the container",
}
"""By a store's scheme: the permissions of a pipeline. Processes that only read need to list and get."""
SCHEMES = tuple(_PERMISSIONS)
_KEPT_S = 24 * 3_600
"""Age above which an unreferenced file cannot belong to a running publication."""
_LOCK = "lock"
_LOCK_KEPT_S, _LOCK_POLL_S = 120, 0.2
_PART_KEPT_S = 60
"""A part that was not written to for this long belongs to no download in progress."""
_CHUNK_BYTES = 8 * 2**20
_TIMEOUT = "20s"
_MAX_LINKS, _MAX_OPENINGS = 10, 3
_NUM_DOWNLOADS = 8
"""Files of a version at a time: a read takes a second in a slow store."""
_PAGE, _READS_PER_PAGE = 1_000, 12
"""Objects per page of a listing. A page costs as much as this many reads on S3, and the processor time of up to 30."""


class ObjectStorage:
    """Versions and names under a prefix of a bucket."""

    def __init__(self, url: str, cache: Path, cache_bytes: int) -> None:
        """Open a bucket's prefix without reading from it.

        `cache_bytes` bounds the cache, not counting versions in use. Raises ConfigError.
        """
        self._url = url.rstrip("/")
        self._cache = cache
        self._versions = VersionCache(cache, cache_bytes)
        self._store = open_store(self._url)
        self._is_lost = False
        self._num_listed = 0
        self._of_process = Lock()
        self._lock_mark: str | None = None

    def __str__(self) -> str:
        return self._url

    @property
    def is_lost(self) -> bool:
        """Whether the store did not answer the last request."""
        return self._is_lost

    def read_record(self, name: str) -> StoredRecord:
        """Return a name's record; the cached record while the store is unavailable.

        Raises StoreUnavailable without a cached record, BundleCorrupt.
        """
        path = f"names/{name}.json"
        try:
            with self._asking(path):
                stored = self._store.get(path)
                return StoredRecord(self._content(stored, path), stored.meta["e_tag"])
        except BundleNotFound:
            return StoredRecord(None, None)
        except StoreUnavailable:
            if (kept := self.kept_record(name)) is not None:
                return StoredRecord(kept, None)
            raise

    def marks(self, names: Collection[str]) -> Mapping[str, str]:
        """Return the marks of these names, except of a name without a record.

        Lists all records, or reads the headers of a few.
        """
        with self._asking("names/"):
            if len(names) <= _READS_PER_PAGE * (1 + self._num_listed // _PAGE):
                heads = {name: self._head(f"names/{name}.json") for name in names}
                return {name: head["e_tag"] for name, head in heads.items() if head is not None}
            entries = {entry["path"]: entry["e_tag"] or "" for chunk in self._store.list("names/") for entry in chunk}
        self._num_listed = len(entries)
        tags = {path: tag.strip('"') for path, tag in entries.items()}  # Azure lists tags without quotes
        return {name: f'"{tag}"' for name in names if (tag := tags.get(f"names/{name}.json"))}

    def keep_record(self, name: str, content: bytes) -> None:
        """Cache a valid record, for times when the store is unavailable or holds an unreadable record."""
        if self.kept_record(name) != content:
            write_durably(self._cache / "names" / f"{name}.json", content)

    def kept_record(self, name: str) -> bytes | None:
        """Return the cached record."""
        with suppress(FileNotFoundError):
            return (self._cache / "names" / f"{name}.json").read_bytes()
        return None

    def swap_record(self, name: str, seen: str | None, content: bytes) -> bool:
        """Replace a name's record if its ETag has not changed since it was read.

        A record from the cache has no ETag.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = "create" if seen is None else {"e_tag": seen}
        try:
            with self._asking(f"names/{name}.json"):
                self._store.put(f"names/{name}.json", content, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def names(self) -> list[str]:
        return [name for name in sorted(self._stems("names")) if is_name(name)]

    def add(self, folder: Path, version: str) -> None:
        """Upload the files that the store lacks, then the manifest, and move the folder to the cache.

        A file that was garbage-collected meanwhile is uploaded again.
        """
        from obstore.exceptions import AlreadyExistsError

        files = hashes(folder)
        self._upload(folder, files)
        with self.alone():
            self._upload(folder, files)
            self._write_lock(uuid4().bytes)
            with suppress(AlreadyExistsError), self._asking(f"versions/{version}.json"):
                self._store.put(f"versions/{version}.json", (folder / MANIFEST).read_bytes(), mode="create")
            if version in self.hidden():  # a killed process had begun to delete it
                self.show(version)
        self._versions.keep(folder, version, files)

    def folder_of(self, version: str) -> OpenedFolder:
        """Return the version's folder in the cache, after downloading missing files.

        A cached version may lack files too: someone may have deleted them to make room on the disk.
        """
        for _ in range(_MAX_OPENINGS):
            folder = self._versions.folder_of(version)
            if (hold := self._versions.hold(version)) is not None:
                self._complete(folder, version)
            else:
                hold = self._download(version)
            if hold is not None:
                return OpenedFolder(folder, hold)
        raise OSError(f"{self._cache}: {version} vanishes while it is opened; raise TAILRACE_BUNDLE_CACHE_GIB")

    def manifest_folder_of(self, version: str, with_report: bool = False) -> Path:
        """Return the version's cached folder, or a folder with only the manifest and, on request, the report."""
        folder, alone = self._versions.folder_of(version), self._cache / "manifests" / version
        if self._versions.has(version):
            return folder
        if not (alone / MANIFEST).exists():
            write_durably(alone / MANIFEST, self._manifest(version))
        if with_report and not (alone / REPORT).exists():
            digest = open_bundle(alone).manifest["files"].get(REPORT)
            if digest is not None:
                with suppress(FileExistsError):
                    self._link(digest, alone / REPORT)
        return alone

    def versions(self) -> list[str]:
        """Return the versions by the time of their manifest, which hiding does not change."""
        published, hidden = self._stems("versions"), set(self.hidden())
        ordered = sorted(published, key=lambda name: (published[name], name))
        return [name for name in ordered if is_version(name) and name not in hidden]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock.

        A holder that has not renewed it for two minutes is presumed stopped; it notices the loss before it deletes
        anything.
        """
        with self._of_process:
            give_up = time.monotonic() + 2 * _LOCK_KEPT_S
            while not self._take_lock():
                if time.monotonic() > give_up:
                    raise StoreUnavailable(
                        f"{self._url}/{_LOCK}: other processes keep the lock; stop the processes that prune"
                    )
                time.sleep(_LOCK_POLL_S)
            try:
                yield
            finally:
                with suppress(StoreUnavailable):  # another process has it, or will take it
                    self._write_lock(b"")

    def hide(self, version: str) -> None:
        with self._asking(f"hidden/{version}"):
            self._store.put(f"hidden/{version}", b"")

    def hidden(self) -> list[str]:
        return [name for path, _ in self._list("hidden/") if is_version(name := Path(path).name)]

    def show(self, version: str) -> None:
        with self._asking(f"hidden/{version}"):
            self._store.delete(f"hidden/{version}")

    def sweep(self) -> None:
        """Delete hidden versions, and files older than a day that no manifest references."""
        with self._asking("files/"):
            hidden = set(self.hidden())
            self._delete([path for path, _ in self._list("versions/") if Path(path).stem in hidden])
            self._delete([f"hidden/{version}" for version in hidden])  # after the manifests, or they would reappear
            kept = self._referenced()
            before = datetime.now(UTC) - timedelta(seconds=_KEPT_S)
            old = [path for path, changed in self._list("files/") if changed < before]
            self._delete([] if kept is None else [path for path in old if Path(path).name not in kept])

    def scratch(self, version: str) -> Path:
        """Return a path of this process in the cache."""
        path = self._cache / f".{version}.{os.getpid()}"
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _referenced(self) -> set[str] | None:
        """Return the hashes of all versions' files; None if a manifest is unreadable, since its files are unknown."""
        kept: set[str] = set()
        for version in self._stems("versions"):
            path = f"versions/{version}.json"
            try:
                content = self._content(self._store.get(path), path)
                kept |= set(decode_manifest(content, version, f"{self._url}/{path}")["files"].values())
            except BundleCorrupt as error:
                log.warning("unreferenced_files_kept", why=str(error))
                return None
        return kept

    def _stems(self, folder: str) -> dict[str, datetime]:
        """Return the JSON documents directly in a folder: names without suffix, and modification times."""
        documents = {path: changed for path, changed in self._list(f"{folder}/") if path.endswith(".json")}
        names = {path: path.removeprefix(f"{folder}/").removesuffix(".json") for path in documents}
        return {names[path]: changed for path, changed in documents.items() if "/" not in names[path]}

    def _content(self, stored: Any, path: str) -> bytes:
        """Return the bytes of a document. Raises BundleCorrupt before downloading a document that is too large."""
        if stored.meta["size"] > MAX_BYTES:
            raise BundleCorrupt(f"{self._url}/{path}: exceeds the maximum of {MAX_BYTES:,} bytes")
        return bytes(stored.bytes())

    def _manifest(self, version: str) -> bytes:
        """Return a version's validated manifest. Raises BundleNotFound or BundleCorrupt."""
        path = f"versions/{version}.json"
        with self._asking(path):
            if self._size(f"hidden/{version}") is not None:
                raise FileNotFoundError(f"{version} is being removed")
            content = self._content(self._store.get(path), path)
        decode_manifest(content, version, f"{self._url}/{path}")
        return content

    def _known_manifest(self, version: str) -> bytes:
        """Return a version's validated manifest, from the cache if it was described before."""
        path = self._cache / "manifests" / version / MANIFEST
        with suppress(FileNotFoundError, BundleCorrupt):
            content = path.read_bytes()
            decode_manifest(content, version, str(path))
            return content
        return self._manifest(version)

    def _download(self, version: str) -> VersionHold | None:
        manifest = self._known_manifest(version)
        scratch = self.scratch(f"{version}.{threading.get_ident()}")  # names may share a version
        scratch.mkdir()
        try:
            (scratch / MANIFEST).write_bytes(manifest)
            files = self._complete(scratch, version)
            log.info("bundle_downloaded", version=version, store=str(self), num_files=len(files))
            return self._versions.keep(scratch, version, files, are_durable=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _complete(self, folder: Path, version: str) -> Mapping[str, str]:
        """Link the files of the manifest that a folder lacks; return the SHA-256 of all, by name."""
        content = (folder / MANIFEST).read_bytes()
        files: Mapping[str, str] = decode_manifest(content, version, f"{self._url}/versions/{version}.json")["files"]
        missing = {digest for name, digest in files.items() if not (folder / name).exists()}
        absent = [digest for digest in missing if not (self._cache / "files" / digest).exists()]
        if len(absent) > 1:
            with ThreadPoolExecutor(_NUM_DOWNLOADS, "download") as pool:
                list(pool.map(self._file, absent))
        for name, digest in files.items():
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):  # another process has completed it meanwhile
                    self._link(digest, target)
        return files

    def _link(self, digest: str, target: Path) -> None:
        """Link the cached file of this content, downloading it if needed.

        Between the two steps another thread or process may remove the file to make room, or replace it by its own.
        """
        for _ in range(_MAX_LINKS):
            with suppress(FileNotFoundError):
                os.link(self._file(digest), target)
                return
        os.link(self._file(digest), target)

    def _file(self, digest: str) -> Path:
        """Return the cached file of this content, resuming an interrupted download. Raises BundleCorrupt."""
        path = self._cache / "files" / digest
        if path.exists():
            return path
        part = self._cache / "parts" / f"{digest}.{os.getpid()}.{threading.get_ident()}"  # names may share files
        for folder in (path.parent, part.parent):
            folder.mkdir(parents=True, exist_ok=True)
        for left in [path for path in part.parent.iterdir() if path.name.startswith(digest)]:
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _PART_KEPT_S:
                    left.replace(part)
        for _ in range(2):  # a part that another writer has damaged is downloaded again from the start
            self._continue(digest, part)
            if file_sha256(part) == digest:
                rename_durably(part, path)
                return path
            part.unlink()
        raise BundleCorrupt(f"{self._url}/files/{digest}: its content has another hash; publish the version again")

    def _continue(self, digest: str, part: Path) -> None:
        with self._asking(f"files/{digest}"), part.open("ab") as file:
            stored = self._store.get(f"files/{digest}")
            size = stored.meta["size"]
            if not file.tell() and size <= _CHUNK_BYTES:
                file.write(stored.bytes())
            while (at := file.tell()) < size:
                file.write(self._store.get_range(f"files/{digest}", start=at, end=min(size, at + _CHUNK_BYTES)))

    def _list(self, prefix: str) -> list[tuple[str, datetime]]:
        with self._asking(prefix):
            return [(entry["path"], entry["last_modified"]) for chunk in self._store.list(prefix) for entry in chunk]

    def _size(self, path: str) -> int | None:
        head = self._head(path)
        return None if head is None else head["size"]

    def _head(self, path: str) -> Any:
        """Return an object's size, ETag and time; None if it does not exist."""
        with suppress(FileNotFoundError):
            return self._store.head(path)
        return None

    def _delete(self, paths: list[str]) -> None:
        """Delete objects while this process holds the lock. Raises StoreUnavailable."""
        if paths:
            self._write_lock(uuid4().bytes)
            self._store.delete(paths)

    def _upload(self, folder: Path, files: Mapping[str, str]) -> None:
        for name, digest in files.items():
            with self._asking(f"files/{digest}"):
                if self._size(f"files/{digest}") != (folder / name).stat().st_size:
                    self._store.put(f"files/{digest}", folder / name)

    def _take_lock(self) -> bool:
        """Take the lock if it is free or its holder has stopped renewing it; return whether it was taken."""
        try:
            with self._asking(_LOCK):
                lock = self._store.head(_LOCK)
        except BundleNotFound:
            mode: Any = "create"
        else:
            if lock["size"] and datetime.now(UTC) - lock["last_modified"] < timedelta(seconds=_LOCK_KEPT_S):
                return False
            mode = {"e_tag": lock["e_tag"]}
        return self._put_lock(uuid4().bytes, mode)

    def _write_lock(self, content: bytes) -> None:
        """Renew the lock, or free it by writing nothing.

        Raises StoreUnavailable if another process has taken it meanwhile.
        """
        if not self._put_lock(content, {"e_tag": self._lock_mark}):
            raise StoreUnavailable(f"{self._url}/{_LOCK}: another process took the lock; prune again")

    def _put_lock(self, content: bytes, mode: Any) -> bool:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._asking(_LOCK):
                self._lock_mark = self._store.put(_LOCK, content, mode=mode, use_multipart=False)["e_tag"]
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    @contextmanager
    def _asking(self, path: str) -> Iterator[None]:
        """Translate the store's failures into our errors; log once when it becomes unavailable and when it is back."""
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreUnavailable(
                    f"{self._url}: the bucket does not exist; create it, or correct TAILRACE_BUNDLE_STORE"
                ) from error
            raise BundleNotFound(f"nothing at {self._url}/{path}") from error
        except BaseError as error:
            if not self._is_lost:
                log.warning("bundle_store_lost", store=str(self), error=str(error))
            self._is_lost = True
            why = _reason(error)
            if isinstance(error, PermissionDeniedError | UnauthenticatedError):
                why = f"access refused, {why}; correct the credentials, or grant {_PERMISSIONS[self._url.partition('://')[0]]}"
            raise StoreUnavailable(f"{self._url} cannot be used ({why})") from error
        if self._is_lost:
            log.info("bundle_store_back", store=str(self))
        self._is_lost = False


def open_store(url: str, named: str = "TAILRACE_BUNDLE_STORE") -> Any:
    """Open obstore's store of a URL. Raises ConfigError naming the setting that gave the URL."""
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme = url.partition("://")[0]
    if scheme not in SCHEMES or not url.partition("://")[2]:
        raise ConfigError(f"{named}: {url} names no store; give s3://BUCKET/PREFIX, gs://… or az://…")
    options: Any = {"timeout": _TIMEOUT, "connect_timeout": "2s", "allow_http": True}
    retries: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=5)}
    try:
        return from_url(url, client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{named}: {url} cannot be opened ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    """Return the first line of a failure, with the service's error name, without obstore's stack trace."""
    text = str(error)
    code = text.partition("<Code>")[2].partition("</Code>")[0]
    first = text.splitlines()[0].split(": <?xml")[0] if text else type(error).__name__
    return f"{code}: {first}" if code else first
