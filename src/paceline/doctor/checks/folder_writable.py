"""Directories that a job must write to and cannot."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host


def look(host: Host, given: Given) -> Iterator[Found]:
    for folder in host.folders:
        if folder.read_only:
            yield Found(
                found=f"{folder.path} ({folder.role}) is on a {folder.kind} file system that is mounted read-only",
                mend=f"mount -o remount,rw {folder.path}; after a disk error, dmesg first",
            )
        elif not folder.writable:
            yield Found(
                found=f"{folder.path} ({folder.role}) cannot be written by this user",
                mend=f"ls -ld {folder.path}; chown or chmod it",
            )


CHECK = Check(
    id="folder-writable",
    severity="error",
    title="A directory that the job writes to is read-only",
    why="the run fails at its first write; 1 host of many is enough",
    mend="mount it writable",
    source="mount(8)",
    needs=("folders",),
    look=look,
)
