"""The key of a launch: every node proves that it knows it before it learns or may do anything.

`--key-file`, else LONGSEQ_KEY, else a file that only this user can read (on loopback, and under a
scheduler, whose nodes usually share the home folder), else one that node 0 makes up and prints.
Nothing that a scheduler puts into the environment is a secret: job ids are public.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from longseq_bench.core.errors import UserError

KEY_VARIABLE = "LONGSEQ_KEY"
MIN_CHARACTERS, MAX_BYTES = 16, 4096
RETRY_S = 0.2


@dataclass(frozen=True)
class LaunchKey:
    """A key. is_new: it was made up for this launch, so the other nodes do not know it yet."""

    secret: bytes = field(repr=False)
    is_new: bool = False

    def bound_to(self, job: str) -> LaunchKey:
        """Return the key of one launch of a scheduler; without a job the same key.

        All launches of a user may share a key, and a port by mistake. With keys of their own, a
        node of another launch is a stranger, which can't end this one.
        """
        if not job:
            return self
        return replace(self, secret=hmac.digest(self.secret, job.encode(), "sha256"))


def find_key(
    environ: MutableMapping[str, str],
    key_file: Path | None,
    is_node_0: bool,
    uses_file_of_user: bool,
    timeout_s: float = 0.0,
) -> LaunchKey:
    """Return the key of this node, and remove it from the environment, which ranks inherit.

    key_file: node 0 creates it if it is missing; other nodes wait for it, at most `timeout_s`.
    uses_file_of_user: without a given key, use the file of this user.

    Raises:
        UserError: there is no key, it is too short, or others can read its file.
    """
    given = environ.pop(KEY_VARIABLE, "").strip()
    if key_file is not None:
        if is_node_0:
            _create(key_file)
        end = time.monotonic() + timeout_s
        while _is_missing(key_file) and time.monotonic() < end:
            time.sleep(RETRY_S)
        return LaunchKey(_read(key_file))
    if given:
        return LaunchKey(_check_length(given, KEY_VARIABLE))
    if uses_file_of_user:
        path = file_of_user(environ)
        _create(path)
        return LaunchKey(_read(path))
    if is_node_0:
        return LaunchKey(secrets.token_urlsafe(32).encode(), is_new=True)
    raise UserError(
        f"this node has no key; start it with the command that node 0 prints, or give every node "
        f"the same key with --key-file or {KEY_VARIABLE}"
    )


def file_of_user(environ: MutableMapping[str, str]) -> Path:
    """Return the path of this user's key, which is used on loopback and under a scheduler."""
    folder = Path(environ.get("XDG_CONFIG_HOME") or "~/.config")
    try:
        return folder.expanduser() / "longseq" / "launch.key"
    except RuntimeError:
        raise UserError(
            f"there is no home folder for the key of a launch; set {KEY_VARIABLE} or use --key-file"
        ) from None


def _create(path: Path) -> None:
    """Write a new key to a file that only this user can read; leave a file that exists."""
    if os.path.exists(path):
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            # a link appears with its content, and never replaces the key of another node
            with suppress(FileExistsError):
                os.link(name, path)
        finally:
            os.unlink(name)
    except OSError as error:
        raise UserError(
            f"the key file {path} can't be written ({error.strerror}); set {KEY_VARIABLE} on every "
            f"node, or use --key-file"
        ) from None


def _is_missing(path: Path) -> bool:
    """Return True if a file may still appear; False also if it can't be read for good."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _read(path: Path) -> bytes:
    """Return the key in a file. Raises UserError if others can read it, or could have made it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"the key file {path} can't be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid():
            raise UserError(f"the key file {path} belongs to another user; make one of your own")
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise UserError(
                f"others can use the key file {path} (mode {mode:o}); run chmod 600 {path}, and "
                f"delete it first if someone may have read it"
            )
        content = file.read(MAX_BYTES).strip()
    return _check_length(content.decode(errors="surrogateescape"), f"the key file {path}")


def _check_length(text: str, place: str) -> bytes:
    if len(text) < MIN_CHARACTERS:
        raise UserError(
            f"{place} holds a key of {len(text)} characters, which can be guessed; use at least "
            f"{MIN_CHARACTERS}, such as the output of `openssl rand -hex 32`"
        )
    return text.encode(errors="surrogateescape")
