"""Files that another process or a later run reads: whole or as before, whenever their writer ends. Stdlib only."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

_PART: Final = ".part"
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})  # of file systems that have none
# Where there may be a file and none beside it: a closed folder, one that is mounted by itself.
_NOT_BESIDE: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY})
_NAMED_CHARS: Final = 40  # of the name that a part shows: with the rest it is none too long for any file system


def write_whole(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """Have ``path`` hold ``data``: made beside it, flushed to the disk, and renamed; a link is followed.

    ``mode``: the file's; None for what it has already, and for what the umask leaves of 0666 to a new one. What is no
    plain file, a pipe or a terminal, is written to as it is, and so is a file that may be written in a folder that may
    not, or that is mounted by itself, where no ``mode`` is asked for. Raises OSError about ``path``, which then is as
    it was.
    """
    content = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():  # asked before links are followed: /dev/stdout leads to no name
        path.write_bytes(content)
        return
    place = Path(os.path.realpath(path))
    part = None
    try:
        kept = stat.S_IMODE(place.stat().st_mode) if mode is None and place.exists() else mode
        part = _part(place, content, kept)
        part.replace(place)
    except OSError as error:
        if mode is not None or error.errno not in _NOT_BESIDE or not place.is_file():
            raise _about(path, error) from error
        path.write_bytes(content)
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def write_new(path: Path, data: str | bytes, *, mode: int | None = None) -> None:
    """The same for a file that must not be there yet, not even as a link. Raises FileExistsError if it is, OSError."""
    part = None
    try:
        part = _part(path, data.encode() if isinstance(data, str) else data, mode)
        try:
            path.hardlink_to(part)  # as a rename, but it replaces nothing
        except OSError as error:
            if error.errno not in _NO_LINKS or os.path.lexists(path):
                raise
            part.replace(path)
    except OSError as error:
        raise _about(path, error) from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def is_part(path: Path) -> bool:
    """Whether a file is what a writer that was killed has left of another one."""
    return path.name.startswith(".") and path.name.endswith(_PART)


def _part(place: Path, content: bytes, mode: int | None) -> Path:
    """A new file beside ``place`` with all of the content on the disk. Raises OSError, leaving nothing."""
    part = place.with_name(f".{place.name[:_NAMED_CHARS]}.{secrets.token_hex(4)}{_PART}")
    handle = os.open(
        part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666 if mode is None else 0o600
    )
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def _about(path: Path, error: OSError) -> OSError:
    """The same error about the file that was asked for; OSError makes the right kind of it by its number."""
    return OSError(error.errno, error.strerror, str(path))
