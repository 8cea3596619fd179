"""Kinds of file systems that lose what is kept there, or are slow at what is done there."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

VOLATILE = ("tmpfs", "ramfs")
LAYERED = ("overlay", "aufs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.glusterfs", "fuse.weka", "wekafs",
           "9p", "virtiofs", "afs", "fuse.juicefs", "fuse.gcsfuse", "fuse.s3fs", "fuse.mountpoint-s3", "quobyte")  # fmt: skip
BUCKETS = ("fuse.gcsfuse", "fuse.s3fs", "fuse.mountpoint-s3")


def look(host: Host, given: Given) -> Iterator[Found]:
    for folder in host.folders:
        if folder.role == "checkpoint" and folder.kind in VOLATILE:
            yield Found(
                found=f"checkpoints go to {folder.path}, which is {folder.kind}: memory of this host",
                why="0 checkpoints are left after a restart of the host, and they count against its memory",
                severity="error",
            )
        elif folder.role == "checkpoint" and folder.kind in LAYERED and given.job is not None and given.several:
            yield Found(
                found=f"checkpoints go to {folder.path}, which is {folder.kind}: a layer of this container",
                why="0 checkpoints are left after the container, and no other host sees them",
                severity="error",
            )
        elif folder.role == "checkpoint" and folder.kind in BUCKETS:
            yield Found(
                found=f"checkpoints go to {folder.path}, which is {folder.kind}: a bucket shown as files",
                mend="set checkpoint.dir to the bucket itself, s3://BUCKET/PATH",
            )
        elif folder.role == "tmp" and folder.kind in NETWORK:
            yield Found(
                found=f"temporary files go to {folder.path}, which is {folder.kind}",
                mend="export TMPDIR=/tmp, or another local directory",
            )


CHECK = Check(
    id="file-system",
    severity="warning",
    title="Checkpoints go to memory or a container's layer, or temporary files over the network",
    why="memory and a container's layer keep 0 checkpoints over a restart; a rename in a bucket writes every byte 2 times",
    mend="set checkpoint.dir to a file system that outlives the host",
    source="gcsfuse documentation, Semantics; Linux kernel documentation, tmpfs",
    needs=("folders",),
    look=look,
)
