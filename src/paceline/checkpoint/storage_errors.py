"""What a failed file operation means for a checkpoint, each cause in its own words. No torch."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.storage_names import join
from paceline.errors import DiskFull, JobError, PacelineError
from paceline.run.files import is_no_space
from paceline.units import format_bytes

if TYPE_CHECKING:
    from paceline.checkpoint.storage import Storage

KEY = "checkpoint.dir"
_GONE = {errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "NoAuthTokenError", "ProfileNotFound"}
_NOT_REACHED = {"EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError", "ClientConnectorError"}


def explain(error: Exception, storage: Storage, name: str, needed_bytes: int | None = None) -> PacelineError:
    """The error to show for one that an operation on `name` of the storage raised.

    Args:
        needed_bytes: of the file or of the save, where that is known.

    Returns:
        DiskFull (79) for space, quota, a file size limit and inodes; JobError (78) for the rest; an error of this product
        as it is.
    """
    if isinstance(error, PacelineError):
        return error
    path = join(storage.place, name)
    values: dict[str, Any] = {"path": path, "needed_bytes": needed_bytes, "free_bytes": _free(storage), "errno": None}
    if storage.is_remote:
        return _of_store(error, path, values)
    if not isinstance(error, OSError):
        return JobError(f"cannot use {path}: {type(error).__name__}: {error}", key=KEY, values=values)
    values["errno"] = error.errno
    if not getattr(storage, "is_mounted", lambda: True)() or error.errno in _GONE:
        return JobError(
            f"cannot reach {path}: {error.strerror} (errno {error.errno}); was {storage.place} unmounted?",
            key=KEY,
            values=values,
            hint="Mount it again, or point checkpoint.dir at another disk, and give the same command again.",
        )
    if is_no_space(error):
        return _no_room(error, storage, path, values)
    return _refused(error, path, values)


def _no_room(error: OSError, storage: Storage, path: str, values: dict[str, Any]) -> DiskFull:
    needed = values["needed_bytes"]
    size = "" if needed is None else f" of {format_bytes(needed)}"
    free = values["free_bytes"]
    left = "an unknown amount" if free is None else format_bytes(free)
    hint = f"Free space there, point {KEY} at another disk, or keep fewer checkpoints with checkpoint.keep."
    if error.errno == errno.EFBIG:
        text = f"cannot write {path}{size}: the file is larger than this process may write (ulimit -f; {left} free)"
        hint = "Raise the limit with `ulimit -f unlimited`."
    elif error.errno == errno.EDQUOT:
        text = f"cannot write {path}{size}: the quota of this user is used up ({left} free on the disk)"
    elif storage.free_files() == 0:
        values["free_files"] = 0
        text = f"cannot write {path}{size}: no inodes left, the file system has no room for another file ({left} free)"
        hint = f"Remove files there (`df -i` shows the count), or point {KEY} at another disk."
    else:
        text = f"no space to write {path}{size}: {left} free"
    return DiskFull(text, key=KEY, values=values, hint=hint)


def _refused(error: OSError, path: str, values: dict[str, Any]) -> JobError:
    hint = f"Point {KEY} at a folder that you may write."
    if error.errno == errno.EROFS:
        text, hint = f"cannot write {path}: its file system is read-only", f"Mount it for writing. Or: {hint}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        text = f"cannot use {path}: permission denied"
    elif error.errno == errno.EEXIST:
        text, hint = f"{path} is there already and is never overwritten", "Give another run.name, or move it away."
    elif error.errno == errno.ENOENT:
        text = f"cannot use {path}: it is not there"
    else:
        text = f"cannot use {path}: {error.strerror or error} (errno {error.errno})"
    return JobError(text, key=KEY, values=values, hint=hint)


def _of_store(error: Exception, path: str, values: dict[str, Any]) -> JobError:
    kinds = {cls.__name__ for cls in type(error).__mro__}
    bucket = "/".join(path.split("/")[:3])
    if isinstance(error, PermissionError):
        text, hint = f"the store denies {path}: {error}", f"Check the credentials and the policy of {bucket}."
    elif kinds & _NO_CREDENTIALS:
        text = f"the store needs credentials for {path}: {error}"
        hint = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
    elif isinstance(error, FileExistsError):
        text, hint = f"{path} is there already and is never overwritten", "Give another run.name, or move it away."
    elif isinstance(error, FileNotFoundError):
        text, hint = f"{path} is not there: {error}", f"Make sure that {bucket} exists and that its name is right."
    elif kinds & _NOT_REACHED or isinstance(error, ConnectionError | TimeoutError):
        text, hint = f"cannot reach the store of {path}: {error}", "Check the network and AWS_ENDPOINT_URL."
    else:
        text, hint = f"the store failed on {path}: {type(error).__name__}: {error}", f"Check {bucket}."
    return JobError(text, key=KEY, values=values, hint=hint)


def _free(storage: Storage) -> int | None:
    try:
        return storage.free_bytes()
    except OSError:
        return None
