"""The predicted step of a run over a slow link beside what it takes: three hosts, the link of one at 200 Mbit/s.

    python -m benchmarks.plan_slow_link          # needs root, iproute2 and util-linux, as tests/netlab does

`paceline bench collectives` and `bench compute` measure the cluster on the hosts, its slow link included; `paceline plan
--fixed` predicts the job from that file alone; `paceline train` runs it on the hosts. Measured is the median of the steps of
the second half. One rank a host, one thread a rank; a round measures all of it anew.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.netlab.lab import Lab

from benchmarks.launch import environment
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.text import one_document_words
from paceline.cluster.spec import MEASURED_FILE
from paceline.units import format_percent, format_seconds

HOSTS, MBIT, WITHIN = 3, 200.0, 0.25
STEPS, ROUNDS = 12, 3
LIMIT_SECONDS = 240.0

JOB = [
    str(ROOT / "examples" / "tiny.toml"), "model.dim=256", "model.num_layers=3", "model.num_heads=4", "model.ffn_dim=1024",
    "batch.global_batch=12", f"parallel.dp_replicate={HOSTS}", "parallel.precision=fp32", "launch.threads=1",
]  # fmt: skip
"""Some 10 MB of gradients."""


def on_hosts(lab: Lab, folder: Path, *words: str) -> str:
    """What rank 0 prints of a command that runs with one rank on each host."""
    started = []
    for rank, host in enumerate(lab.hosts):
        own = folder / f"rank-{rank}"
        own.mkdir(exist_ok=True)
        command = [*lab.prefix(host), sys.executable, "-m", "paceline", *words]
        env = {**environment(), **lab.variables(rank)}
        started.append(
            subprocess.Popen(command, cwd=own, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    ended = [(*one.communicate(timeout=LIMIT_SECONDS), one.returncode) for one in started]
    if any(code for _, _, code in ended):
        raise RuntimeError("\n".join(error[-2000:] for _, error, _ in ended))
    return ended[0][0]


def round_of(lab: Lab, steps: int) -> dict[str, Any]:
    """One measurement of the cluster, its plan, and the run."""
    with tempfile.TemporaryDirectory(prefix="paceline-slow-link-") as name:
        folder = Path(name)
        cluster = folder / "rank-0" / MEASURED_FILE
        sizes = ["--min", "64KiB", "--max", "16MiB", "--factor", "4", "--iterations", "3", "--warmup", "1"]
        on_hosts(
            lab, folder, "bench", "collectives", *sizes, "--collectives", "all_reduce", "--save", str(cluster), "--json"
        )
        on_hosts(lab, folder, "bench", "compute", "--save", str(cluster), "--json")
        job = [*JOB, *one_document_words()]
        plan = [sys.executable, "-m", "paceline", "plan", *job, "--fixed", "--cluster", str(cluster), "--json"]
        told = subprocess.run(plan, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
        chosen = json.loads(told.stdout)["chosen"]
        run = folder / "run"
        on_hosts(
            lab, folder, "train", *job, f"run.steps={steps}", f"run.dir={json.dumps(str(run))}", "checkpoint.every=end"
        )
        lines = [json.loads(line) for path in run.rglob("*rank0.jsonl") for line in path.read_text().splitlines()]
    late = [one for one in lines if one["kind"] == "step" and one["step"] > steps // 2]
    took = statistics.median(one["seconds"] for one in late)
    return {
        "plan": chosen["step_seconds"], "measured": took, "error": chosen["step_seconds"] / took - 1,
        "plan_parts": chosen["step_parts"], "parts": late[-1]["parts"],
    }  # fmt: skip


def measure(rounds: int, steps: int, mbit: float = MBIT) -> list[dict[str, Any]]:
    """All rounds on hosts of which the last has the slow link."""
    with Lab((HOSTS,)) as lab:
        lab.link(lab.hosts[-1], mbit)
        found = []
        for number in range(1, rounds + 1):
            found.append(round_of(lab, steps))
            say(f"  round {number} of {rounds}: {told(found[-1])}")
        return found


def told(one: dict[str, Any]) -> str:
    return f"{format_percent(one['error'])}: {format_seconds(one['plan'])} for {format_seconds(one['measured'])}"


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds = measure(1, 4) if args.quick else measure(ROUNDS, STEPS)
    middle = sorted(rounds, key=lambda one: abs(one["error"]))[len(rounds) // 2]
    figures = [
        Figure(
            f"step over a link of {MBIT:g} Mbit/s, {HOSTS} hosts", f"within {WITHIN:.0%}",
            f"{told(middle)}, the middle of {len(rounds)} rounds; the worst "
            f"{format_percent(max(abs(one['error']) for one in rounds))}",
            abs(middle["error"]) <= WITHIN,
        )
    ]  # fmt: skip
    return finish("plan_slow_link", figures, {"rounds": rounds}, args, JOB)


if __name__ == "__main__":
    sys.exit(main())
