"""Which CPUs and how many threads each local rank gets: an even share of what this process may use, never more.

Defaults give every rank all CPUs and as many threads as CPUs: ranks x threads above the cores makes all of them slow.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.workers import environment

SPARE_SHARE = 8
"""A rank with fewer CPUs than this leaves none to its loader and the writer: one of 7 would be more than they use."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs that this process may use, as taskset, cgroup or Slurm left them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


_AT_IMPORT = allowed_cpus()


class RankCpus(NamedTuple):
    """CPUs a rank may run on and its number of threads; `pinned` where the CPUs are its own.

    `spare` of them have no thread of the rank: they are left to its loader and the writer of checkpoints.
    """

    cpus: tuple[int, ...]
    threads: int
    pinned: bool
    spare: int = 0


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """CPUs' worth of time that the cgroup grants (a container's `--cpus`), or None without a limit."""
    quotas = [q for folder in _cgroup_folders(root, membership) if (q := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def quota_folders(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"), others: Path | None = None
) -> list[Path]:
    """The cgroups of this process that have a CPU quota.

    Args:
        others: membership of another process, whose cgroups do not count.
    """
    shared = [] if others is None else _cgroup_folders(root, others)
    return [f for f in _cgroup_folders(root, membership) if f not in shared and _quota_of(f) is not None]


def plan_affinity(
    local_world_size: int,
    allowed: Sequence[int],
    quota: float | None,
    threads: int | None = None,
    *,
    pin: bool = True,
    order: Mapping[int, tuple[int, int]] | None = None,
    helpers: int = 0,
    near: Sequence[Collection[int]] = (),
) -> list[RankCpus]:
    """An even share of `allowed` for each local rank.

    Ranks have CPUs of their own where there is at least one each and no quota is below them (under a quota other
    containers use the same CPUs, so holding a rank to one of them would only make it wait).

    Args:
        quota: CPUs' worth of time, see `cpu_quota`.
        threads: per rank as the user set it; otherwise threads x ranks is at most the number of CPUs, at least 1 each.
        pin: False leaves every rank on all CPUs.
        order: socket and core by CPU; neighbours in it go to the same rank.
        helpers: processes beside each rank (loader, writer) that CPUs are left for, at most one in `SPARE_SHARE`.
        near: of each local rank the CPUs near its device; it gets its CPUs out of those, where all ranks can.
    """
    cores = len(allowed) if quota is None else max(1, min(len(allowed), math.floor(quota)))
    share = max(1, cores // local_world_size)
    if not pin or local_world_size == 1 or local_world_size > len(allowed) or cores < len(allowed):
        spare = 0 if threads else _spare(share, helpers)
        return [RankCpus(tuple(allowed), threads or share - spare, False, spare)] * local_world_size
    ordered = sorted(allowed, key=lambda cpu: (*(order or {}).get(cpu, (0, 0)), cpu))
    slices = _near_slices(ordered, local_world_size, near) or _slices(ordered, local_world_size)
    share = min(len(cpus) for cpus in slices)
    spare = 0 if threads else _spare(share, helpers)
    return [RankCpus(cpus, threads or share - spare, True, spare) for cpus in slices]


def _spare(share: int, helpers: int) -> int:
    """CPUs of a rank's share that are left to its helpers.

    A parallel region ends with its last thread, so that one CPU shared with a loader slows all of them; but a rank with few
    CPUs would lose more by having one less.
    """
    return min(helpers, share // SPARE_SHARE)


def _slices(ordered: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    edges = [rank * len(ordered) // ranks for rank in range(ranks + 1)]
    return [tuple(sorted(ordered[a:b])) for a, b in itertools.pairwise(edges)]


def _near_slices(ordered: Sequence[int], ranks: int, near: Sequence[Collection[int]]) -> list[tuple[int, ...]]:
    """Slices out of the CPUs near each rank's device; ranks with the same ones share them evenly. Nothing where one of them
    would get none."""
    if len(near) < ranks:
        return []
    groups: dict[frozenset[int], list[int]] = {}
    for rank in range(ranks):
        groups.setdefault(frozenset(near[rank]), []).append(rank)
    found: dict[int, tuple[int, ...]] = {}
    taken: set[int] = set()
    for cpus, members in groups.items():
        own = [cpu for cpu in ordered if cpu in cpus]
        if len(own) < len(members) or taken.intersection(own):
            return []
        taken.update(own)
        found |= dict(zip(members, _slices(own, len(members)), strict=True))
    return [found[rank] for rank in range(ranks)]


def thread_environment(plan: RankCpus, env: Mapping[str, str]) -> dict[str, str]:
    """Thread variables for a worker; what the user has set in `env` stays, and the others follow OMP_NUM_THREADS.

    Where torch is built with MKL, the library's own variable wins over OMP_NUM_THREADS (docs/log.md).
    """
    threads = env.get("OMP_NUM_THREADS") or str(plan.threads)
    return {name: threads for name in THREAD_VARIABLES if name not in env}


def describe(plan: Sequence[RankCpus], quota: float | None = None, env: Mapping[str, str] | None = None) -> str:
    """One line: `cpus: 2 ranks x 1 thread, pinned to 0 | 1`."""
    first = plan[0]
    user = (env or {}).get("OMP_NUM_THREADS")
    threads = f"{user or first.threads} thread{'' if str(user or first.threads) == '1' else 's'}"
    origin = " (OMP_NUM_THREADS)" if user else ""
    ranks = f"{len(plan)} rank{'' if len(plan) == 1 else 's'}"
    limit = f", quota {quota:g}" if quota is not None else ""
    if first.spare and not user:
        threads += f" ({first.spare} left for loader and writer)"
    if first.pinned:
        return f"cpus: {ranks} x {threads}{origin}, pinned to {' | '.join(cpu_list(p.cpus) for p in plan)}{limit}"
    return f"cpus: {ranks} x {threads}{origin} on cpus {cpu_list(first.cpus)}{limit}"


def warnings(plan: Sequence[RankCpus], quota: float | None, env: Mapping[str, str]) -> list[str]:
    """What makes this plan slow, one sentence each."""
    cores = len({cpu for p in plan for cpu in p.cpus})
    cores = cores if quota is None else max(1, min(cores, math.floor(quota)))
    per_rank = int(env["OMP_NUM_THREADS"]) if env.get("OMP_NUM_THREADS", "").isdigit() else plan[0].threads
    found = []
    if len(plan) > cores:
        found.append(f"{len(plan)} ranks share {cores} CPU{'s' * (cores > 1)}; more than one a CPU only costs time")
    elif len(plan) * per_rank > cores:
        found.append(
            f"{len(plan)} ranks x {per_rank} threads are more than {cores} CPUs; unset OMP_NUM_THREADS or lower it"
        )
    return found


def apply(plan: RankCpus) -> None:
    """Hold the calling thread, and what it starts from now on, to the plan's CPUs (Linux); before torch is imported."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, plan.cpus)


def rank_cpus() -> tuple[int, ...]:
    """The CPUs of this rank as its launcher gave them: loader processes may use all of them.

    Without a launcher of ours: those that this process had when this module was imported, which is before torch.
    """
    text = os.environ.get(environment.CPUS, "")
    return tuple(parse_cpu_list(text)) if text else _AT_IMPORT


def shrunk_mask_warning(before: Collection[int], env: Mapping[str, str] | None = None) -> str | None:
    """A warning where the mask is smaller than `before`: an OpenMP runtime binds the thread that imports it."""
    env = os.environ if env is None else env
    now = allowed_cpus()
    if len(now) >= len(before):
        return None
    variables = [name for name in ("OMP_PROC_BIND", "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY") if name in env]
    culprit = f"{', '.join(f'{n}={env[n]}' for n in variables)}" if variables else "an imported library"
    return (
        f"{culprit} bound this process to CPUs {cpu_list(now)} of its {cpu_list(sorted(before))}; "
        f"loader processes keep all of them, other threads do not"
    )


def core_order() -> dict[int, tuple[int, int]]:
    """Socket and core of each CPU, from the kernel; empty where it does not say."""
    order = {}
    for cpu in allowed_cpus():
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            order[cpu] = (int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text()))
        except (OSError, ValueError):
            return {}
    return order


def cpu_list(cpus: Sequence[int]) -> str:
    """`0-3,8` of (0, 1, 2, 3, 8)."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_cpu_list(text: str) -> list[int]:
    """(0, 1, 2, 3, 8) of `0-3,8`."""
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """Folders that may hold a CPU limit: of cgroup v2 and of v1's cpu controller, this process's and all above it."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / controllers if controllers else root
        base = base if base.is_dir() or not controllers else root / "cpu"
        parts = Path(path.lstrip("/")).parts
        folders += [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return folders


def _quota_of(folder: Path) -> float | None:
    try:
        if (new := folder / "cpu.max").exists():
            quota, period = new.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{part}_us").read_text().strip() for part in ("quota", "period"))
    except (OSError, ValueError):
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
