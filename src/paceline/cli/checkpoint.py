"""`paceline checkpoint`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from paceline.checkpoint.listing import Listed
    from paceline.checkpoint.verify import Verified
    from paceline.errors import PacelineError

EXAMPLE = """\
example:
  paceline checkpoint list runs/tiny
  paceline checkpoint verify runs/tiny/checkpoints/step-00000700
  paceline checkpoint convert runs/tiny --to packed --files 1
  paceline checkpoint convert runs/tiny --to weights --weights-only --dtype bf16
  paceline checkpoint export runs/tiny --to tiny.safetensors
  paceline checkpoint import tiny.safetensors --to start
"""
ACTIONS = ("list", "verify", "convert", "export", "import")
TAKES = {
    "to": ("convert", "export", "import"),
    "files": ("convert",),
    "weights_only": ("convert",),
    "dtype": ("convert", "export"),
}
"""Which actions an option has an effect on."""
QUIET_SECONDS = 1.0
"""Shorter work shows no progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="list what is there; verify every byte (1: damage found); convert into other files; export the weights as one "
        "plain safetensors file; import such a file as a checkpoint of step 0, for a run to start from its weights",
    )
    parser.add_argument(
        "path", metavar="PATH", help="a run directory, a checkpoints folder, one step's folder, or a URL; convert and export "
        "take the newest checkpoint there; import: a safetensors file",
    )  # fmt: skip
    parser.add_argument(
        "--to", metavar="PLACE", help="convert, import: checkpoints folder or URL; export: the new file"
    )
    parser.add_argument("--files", type=int, metavar="N", help="convert: files to spread the pieces over (1)")
    parser.add_argument("--weights-only", action="store_true", help="convert: leave out all but the model's tensors")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="export, convert --weights-only: type of floating-point parameters"
    )


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document
    from paceline.errors import PacelineError

    _check(args)
    action = {"list": _list, "verify": _verify}.get(args.action, _write)
    try:
        document, lines, code = action(args)
    except PacelineError as error:
        _speak_of_options(error, args)
        raise
    if args.json:
        print_document("checkpoint", {"action": args.action, "path": args.path, **document, "exit": code})
    else:
        print("\n".join(lines))
    return code


def _check(args: argparse.Namespace) -> None:
    """Refuse an option without effect, and a missing one."""
    from paceline.errors import UsageError

    for option, actions in TAKES.items():
        if getattr(args, option) not in (None, False) and args.action not in actions:
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} has no effect on {args.action}; it belongs to {', '.join(actions)}")
    if args.action in TAKES["to"] and not args.to:
        raise UsageError(f"{args.action} writes something new and needs --to", hint="See paceline checkpoint --help.")
    if args.files is not None and args.files < 1:
        raise UsageError(f"--files {args.files} writes nothing; give 1 or more")
    if args.action == "convert" and args.dtype and not args.weights_only:
        raise UsageError(
            f"--dtype {args.dtype} would give parameters another type than their optimizer state has",
            hint="Add --weights-only, or leave --dtype out.",
        )


def _speak_of_options(error: PacelineError, args: argparse.Namespace) -> None:
    """An error of the storage names the key of a job; there is none here."""
    if error.key != "checkpoint.dir":
        return
    error.key = "--to" if args.to and str(error.values.get("path", "")).startswith(args.to) else "PATH"
    full = error.exit_code == 79
    error.hint = (
        "Free space there, or name another place." if full else (error.hint or "").replace("checkpoint.dir", error.key)
    )


def _list(args: argparse.Namespace) -> tuple[dict[str, Any], Sequence[str], int]:
    import msgspec

    from paceline.checkpoint.listing import list_checkpoints

    found = list_checkpoints(args.path)
    return {"checkpoints": msgspec.to_builtins(found)}, _table(found), 0


def _table(found: Sequence[Listed]) -> list[str]:
    import time

    from paceline.units import format_bytes, format_seconds

    rows = [("step", "size", "age", "ranks", "eval loss", "state")]
    for item in found:
        age = "-" if item.time is None else format_seconds(max(0.0, time.time() - item.time))
        loss = "-" if item.eval_loss is None else f"{item.eval_loss:.4f}"
        ranks = "-" if item.world_size is None else str(item.world_size)
        state = f"{item.state}: {item.problem}" if item.problem else item.state
        step = "-" if item.step is None else str(item.step)
        rows.append((step, format_bytes(item.size_bytes), age, ranks, loss, state))
    wide = [max(len(row[column]) for row in rows) for column in range(5)]
    return ["  ".join([*(f"{t:>{w}}" for t, w in zip(row, wide, strict=False)), row[5]]) for row in rows]


def _verify(args: argparse.Namespace) -> tuple[dict[str, Any], Sequence[str], int]:
    import msgspec

    from paceline.checkpoint.verify import verify_folder

    with _progress("verifying") as progress:
        verdicts = verify_folder(args.path, progress)
    code = 1 if any(verdict.findings for verdict in verdicts) else 0
    documents = msgspec.to_builtins(verdicts)
    for document, verdict in zip(documents, verdicts, strict=True):
        for entry, finding in zip(document["findings"], verdict.findings, strict=True):
            entry["text"] = finding.describe()
    return {"checkpoints": documents}, [line for verdict in verdicts for line in _verdict(verdict)], code


def _verdict(verdict: Verified) -> Iterator[str]:
    from paceline.units import format_bytes

    if not verdict.committed:
        yield f"{verdict.path}: no checkpoint, its save did not finish"
    elif verdict.findings:
        yield f"{verdict.path}: DAMAGED"
        yield from (f"  {finding.describe()}" for finding in verdict.findings)
    else:
        yield f"{verdict.path}: every byte of {format_bytes(verdict.size_bytes)} is as it was written"


def _write(args: argparse.Namespace) -> tuple[dict[str, Any], Sequence[str], int]:
    import importlib

    from paceline.units import format_bytes

    # By name: this file is read by actions that need no torch.
    convert = importlib.import_module("paceline.checkpoint.convert")
    with _progress(f"{args.action}ing") as progress:
        if args.action == "convert":
            done = convert.convert(
                args.path, args.to, files=args.files or 1, weights_only=args.weights_only, dtype=args.dtype, progress=progress
            )  # fmt: skip
        elif args.action == "export":
            done = convert.export_weights(args.path, args.to, dtype=args.dtype, progress=progress)
        else:
            done = convert.import_weights(args.path, args.to, progress=progress)
    document = {"written": done._asdict()}
    count = "1 tensor" if done.tensors == 1 else f"{done.tensors} tensors"
    return document, [f"{done.path}: {count}, {format_bytes(done.size_bytes)}"], 0


def _progress(what: str) -> Any:
    """A bar on a terminal and lines elsewhere, for work that takes longer than `QUIET_SECONDS`."""
    import contextlib

    @contextlib.contextmanager
    def shown() -> Iterator[Callable[[int, int], None]]:
        import time

        from paceline.data import progress as display

        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            show: list[Any] = []

            def tell(done: int, total: int) -> None:
                if not show and time.monotonic() - begin > QUIET_SECONDS:
                    show.append(stack.enter_context(display.shown(None, "checkpoint")))
                if show:
                    show[0](what, done, total)

            yield tell

    return shown()
