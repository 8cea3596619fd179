"""`paceline doctor`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from paceline.doctor.run import Report
    from paceline.job.load import Job

EXAMPLE = """\
example:
  paceline doctor
  paceline doctor examples/tiny.toml --procs 2 --json
  paceline doctor --capture node1.json
  paceline doctor --from node1.json node2.json
  paceline doctor --measure
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="JOB.toml | section.key=value", help="a job to weigh, and to try out"
    )
    parser.add_argument(
        "--procs", type=int, metavar="N", help="ranks of the job on this host; one per device unless given"
    )
    parser.add_argument(
        "--capture",
        metavar="F",
        help="write what the checks read of this host into the file F as well; %%h is its name",
    )
    parser.add_argument(
        "--from",
        dest="snapshots",
        nargs="+",
        metavar="F",
        help="judge captured hosts and how they differ, not this one",
    )
    parser.add_argument(
        "--measure", action="store_true", help="time this host with and without what matters, ten seconds each"
    )


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document, say
    from paceline.cli.job_words import job_of
    from paceline.cli.planned import planned_job
    from paceline.doctor.text import describe

    _check(args)
    job = None
    if args.words or args.procs is not None:
        # A layout that depends on the ranks belongs to the host that starts them, not to one that reads snapshots.
        job = job_of(args) if args.snapshots else planned_job(args)[0]
    report = _from_files(args, job) if args.snapshots else _here(args, job)
    if report is None:
        return 0
    if args.json:
        say(describe(report))
        print_document("doctor", report.document())
    else:
        print(describe(report))
    return 1 if report.findings else 0


def _check(args: argparse.Namespace) -> None:
    from paceline.errors import UsageError

    if not args.snapshots:
        return
    for name in ("capture", "measure"):
        if getattr(args, name):
            raise UsageError(f"--{name} is about this host, --from about captured ones; leave one of them out")


def _from_files(args: argparse.Namespace, job: Job | None) -> Report:
    from pathlib import Path

    from paceline.doctor.run import judge, read_hosts

    hosts, unreadable = read_hosts([Path(name) for name in args.snapshots])
    return judge(hosts, job, unreadable)


def _here(args: argparse.Namespace, job: Job | None) -> Report | None:
    """This host, or all that torchrun started on; None on a rank that only hands its snapshot over."""
    from pathlib import Path

    from paceline.cli import say
    from paceline.doctor import run, snapshot

    host = run.this_host(job, try_out=bool(args.words))
    if args.capture and (host.place is None or host.place.local_rank == 0):
        snapshot.write(host, Path(args.capture.replace("%h", host.name)))
    hosts = run.all_hosts(host)
    if hosts is None:
        return None
    report = run.judge(hosts, job)
    if args.words and job is not None:
        report = run.smoke_test(job, report)
    if args.measure:
        report = run.measured(host, report, say)
    return report
