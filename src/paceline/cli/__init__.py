"""The command line: finds the command, parses, prints errors the same way for all. Standard library only.

Each command is a file with `add_arguments(parser)` and `run(args) -> int`; what is heavy is imported inside `run`.
"""

from __future__ import annotations

import sys

from paceline.errors import Interrupted, PacelineError, UsageError

TYPE_CHECKING = False  # typing.TYPE_CHECKING without the import: `--help` may take 3x the interpreter's bare start
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any, NoReturn

COMMANDS = {
    "train": "train (starts its own local workers, or joins torchrun's)",
    "plan": "predict what a layout needs, before anything is started",
    "bench": "measure what this machine does: collectives, fabric, compute, storage, loader",
    "prove": "prove exact resume: straight against killed and resumed, same and other ranks",
    "drill": "prove that a job survives: kill, stall, preempt, corrupt, resume, compare",
    "doctor": "find what is wrong with a machine or a job before it costs money",
    "report": "explain a run",
    "stop": "end a live run after its present step, its state saved",
    "save": "have a live run save after its present step, and go on",
    "generate": "continue a text with a trained model",
    "checkpoint": "list, verify, convert, export or import checkpoints",
    "data": "prepare or inspect the token shards",
}
VERSION = "0.1.0"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of `docs/guide/exit-codes.md`."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    verb = words[0] if words else ""
    try:
        return _dispatch(words)
    except PacelineError as error:
        return _fail(error, verb, as_json)
    except KeyboardInterrupt:
        return _fail(Interrupted("interrupted; nothing was saved"), verb, as_json)
    except BrokenPipeError:
        import os

        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _fail(PacelineError(f"{type(error).__name__}: {error}"), verb, as_json, printed=True)


def print_document(verb: str, document: dict[str, Any]) -> None:
    """The one JSON document of a command, on stdout."""
    import json

    from paceline.run.records import json_safe

    print(json.dumps(json_safe({"schema": f"paceline.{verb}/1", **document})), flush=True)


def say(text: str = "") -> None:
    """Text for people, on stderr where stdout carries JSON and is left alone."""
    print(text, file=sys.stderr, flush=True)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if words[0] == "--version":
        print(f"paceline {VERSION}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"Did you mean paceline {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        raise UsageError(f"there is no command {name!r}", values={"command": name}, hint=hint)
    command, prog, summary, rest = find_command(words)
    parser = _parser(
        prog=f"paceline {prog}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=getattr(command, "EXAMPLE", None),
    )
    parser.add_argument("--json", action="store_true", help="print exactly one JSON document on stdout")
    command.add_arguments(parser)
    parse = parser.parse_args if getattr(command, "REMAINDER", False) else parser.parse_intermixed_args
    return int(command.run(parse(rest)))


def find_command(words: Sequence[str]) -> tuple[Any, str, str, Sequence[str]]:
    """The module of a command, or of the second word where a command has a table of `SUBCOMMANDS`.

    Returns:
        The module, its words, what it does, and the words that are left.

    Raises:
        UsageError: the second word is none of the table's.
    """
    import importlib

    name = words[0]
    command = importlib.import_module(f"paceline.cli.{name}")
    table: dict[str, tuple[str, str]] = getattr(command, "SUBCOMMANDS", {})
    if not table or (len(words) > 1 and words[1] in ("-h", "--help")):
        return command, name, COMMANDS[name], words[1:]
    if len(words) < 2 or words[1] not in table:
        found = f"there is no {name} {words[1]!r}" if len(words) > 1 else f"paceline {name} needs to know what"
        raise UsageError(found, hint=f"One of: {', '.join(table)}. See paceline {name} --help.")
    module, summary = table[words[1]]
    return importlib.import_module(module), f"{name} {words[1]}", summary, words[2:]


def _parser(**options: Any) -> argparse.ArgumentParser:
    """argparse that raises instead of leaving, so that `--json` can answer a usage error too."""
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(message, hint=f"See {self.prog} --help.")

    def formatter(prog: str) -> argparse.HelpFormatter:
        # A stated width spares argparse the import that asks the terminal for its own.
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=36, width=110)

    return Parser(formatter_class=formatter, **options)


def _overview() -> str:
    rows = "\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: paceline COMMAND [JOB.toml] [section.key=value ...] [options]\n\n"
        "Trains one model on many devices: plans the run, trains it in any layout, explains it.\n\n"
        f"commands:\n{rows}\n\n"
        "example:\n  paceline train examples/tiny.toml run.steps=30 --procs 2\n\n"
        "paceline COMMAND --help explains one; --version prints the version."
    )


def _fail(error: PacelineError, verb: str, as_json: bool, printed: bool = False) -> int:
    if not printed:
        say(f"paceline: {error}")
    if as_json:
        print_document(verb, failure_fields(error))
    return error.exit_code


def failure_fields(error: PacelineError) -> dict[str, Any]:
    """`exit` and `error` of a document that tells of a failure."""
    record = error.to_record()
    return {
        "exit": error.exit_code,
        "error": {
            "kind": record["kind"],
            "message": record["message"],
            "values": record["values"],
            "key": record["key"],
            "reason": record["message"],
            "next": record["hint"],
        },
    }
