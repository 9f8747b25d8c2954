"""The bearer token, the limit on requests, and the name by which the service may be called.

- The token is made on the first start, in a file that only its owner reads, and stands nowhere else. It is compared in
  constant time, by hashes, so that its length does not show either.
- Wrong tokens have a bucket of their own: who guesses is slowed down, and who has the token is not.
- A page elsewhere whose name is made to lead to 127.0.0.1 (DNS rebinding) calls the service by that name: the Host
  header tells.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path

from gristmill.errors import UserError

MIN_TOKEN = 32
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
#: What can stand in a header, and in a URL's fragment without quoting.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")


def read_or_make_token(path: Path) -> str:
    """The token of a file, which is made with one if it is not there.

    Raises:
        UserError: others can read the file, or what stands in it is no token.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return _make(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name another with --token-file") from error
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise UserError(f"--token-file {path} is a folder; name a file in it")
    with os.fdopen(fd) as handle:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o077:
            raise UserError(f"{path} has mode {mode:o}, so others can read the token; chmod 600 {path}, or remove it")
        try:
            token = handle.read(4096).strip()
        except (OSError, ValueError) as error:  # bytes that are no text
            raise UserError(f"{path} has no token in it ({error}); remove it, or name another --token-file") from error
    if len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token):
        raise UserError(
            f"{path} has {len(token)} characters, but a token has {MIN_TOKEN} or more letters and digits; remove the "
            "file and start again for a new one"
        )
    return token


def _make(path: Path) -> str:
    """A new token. The file appears with all of it or not at all, and a start at the same time makes only one."""
    token = secrets.token_urlsafe(32)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as handle:
            handle.write(token + "\n")
            handle.flush()
            os.fsync(fd)
        os.link(temporary, path)
    except FileExistsError:
        return read_or_make_token(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another with --token-file") from error
    finally:
        temporary.unlink(missing_ok=True)
    return token


def require_safe_address(host: str, token_named: bool) -> None:
    """Refuse to be reached from elsewhere with a token that nobody chose.

    Raises:
        UserError: `host` is no loopback address and no token file is named.
    """
    if not (is_loopback(host) or token_named):
        raise UserError(
            f"--host {host} can be reached from elsewhere, without encryption; use 127.0.0.1 and an ssh tunnel "
            "(docs/service.md), or name --token-file to do it all the same"
        )


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own; names other than localhost are not believed."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(header: str) -> str:
    """The name in a Host header, without its port: `[::1]:8765` → `::1`."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def known_hosts(host: str, more: tuple[str, ...]) -> frozenset[str]:
    """The names by which the service may be called."""
    return _LOOPBACK_NAMES | {host.strip("[]").lower(), *(name.lower() for name in more)}


class Gate:
    """Knows the token, and that too many requests are too many."""

    def __init__(self, token: str, per_second: float, now: Callable[[], float] = time.monotonic) -> None:
        """Keep a hash of the token; the token itself is not kept."""
        self._digest = _digest(token)
        self.requests = Bucket(per_second, 2 * per_second, now)
        self.guesses = Bucket(1.0, 20.0, now)

    def knows(self, header: str | None) -> bool:
        """Whether an Authorization header has the token."""
        scheme, _, token = (header or "").partition(" ")
        right = hmac.compare_digest(_digest(token.strip()), self._digest)
        return right and scheme.lower() == "bearer"


class Bucket:
    """A token bucket: `per_second` on average, `burst` at once."""

    def __init__(self, per_second: float, burst: float, now: Callable[[], float]) -> None:
        """Begin full."""
        self._per_second, self._burst, self._now = per_second, max(1.0, burst), now
        self._left, self._at = self._burst, now()

    def take(self) -> float | None:
        """None when there was one; else the seconds until there is."""
        now = self._now()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left >= 1:
            self._left -= 1
            return None
        return (1 - self._left) / self._per_second


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
