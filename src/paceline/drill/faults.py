"""The faults that a drill tries: what each does, how a run must end that suffers it, and by which words it is named."""

from __future__ import annotations

from typing import Literal, NamedTuple

Ends = Literal["done", "preempted", "no progress", "bad step"]
"""How a run ends that survives: with exit code 0; with 75 and then 0; with 93; with 1 by the policy on bad steps."""

Strikes = Literal["worker", "writer", "checkpoint", "ranks"]
"""Where it is done: in a rank, in the checkpoint writer, on the files of a killed run, by going on on other ranks."""


class Fault(NamedTuple):
    """One kind of fault.

    named: kinds of the `fault` or `straggler` record that name it. ranks: that it needs at least. alive: the run goes on
    without a restart. blames: the record must name the rank.
    """

    kind: str
    does: str
    strikes: Strikes = "worker"
    ends: Ends = "done"
    named: tuple[str, ...] = ()
    ranks: int = 1
    alive: bool = False
    blames: bool = True


FAULTS = (
    Fault("kill", "SIGKILL to a rank at a random moment of a step", named=("killed",)),
    Fault("kill-in-save", "SIGKILL to a rank while it saves", named=("killed",)),
    Fault("exception", "an exception in a rank, once", named=("exception",)),
    Fault("stop", "SIGSTOP to a rank", named=("stopped",)),
    Fault("skipped-collective", "a rank leaves out a collective that the others enter", ranks=2,
          named=("missing-collective", "mismatched-collective")),
    Fault("stuck-loader", "a rank's loader gives no batch any more", named=("loader",)),
    Fault("held-gil", "native code in a rank holds the interpreter for ever", named=("gil",)),
    Fault("slow-rank", "a rank sleeps in its own work of every step", ranks=2, named=("compute",), alive=True),
    Fault("slow-cpu", "a rank gets a quarter of a CPU", ranks=2, named=("compute",), alive=True),
    Fault("slow-data", "a rank's batches come late in every step", ranks=2, named=("data",), alive=True),
    Fault("slow-link", "the network between the ranks gets slow", ranks=2, named=("link",), alive=True, blames=False),
    Fault("preemption", "SIGTERM to one rank, then the same command again", ends="preempted"),
    Fault("corrupted-checkpoint", "a bit of the newest checkpoint is flipped, then the same command again",
          strikes="checkpoint", blames=False),
    Fault("truncated-checkpoint", "half a file of the newest checkpoint is cut off, then the same command again",
          strikes="checkpoint", blames=False),
    Fault("full-disk", "no space is left while one checkpoint is written", strikes="writer", alive=True, blames=False),
    Fault("changed-ranks", "killed, then gone on with on another number of ranks", strikes="ranks", blames=False),
    Fault("nan", "a rank's gradients are no numbers any more", ends="bad step", blames=False),
    Fault("crash-loop", "the same exception whenever a step comes", ends="no progress", named=("exception",)),
)  # fmt: skip

BY_KIND = {fault.kind: fault for fault in FAULTS}


class Control(NamedTuple):
    """A protection switched off, and the fault that must then not be survived."""

    without: str
    kind: str
    does: str


CONTROLS = (
    Control("restarts", "kill", "a failed attempt is the end"),
    Control("watchdog", "stop", "nobody looks whether ranks move"),
    Control("checksums", "corrupted-checkpoint", "what is read from a checkpoint is believed"),
    Control("stop-handler", "preemption", "a rank does not hear SIGTERM as a wish"),
    Control("no-progress-rule", "crash-loop", "a failure may come again without end"),
    Control("finite-check", "nan", "a step is taken whatever its gradients are"),
    Control("failed-save-policy", "full-disk", "a save that fails ends the run"),
    Control("straggler-watch", "slow-rank", "nobody compares the ranks' own work"),
)
