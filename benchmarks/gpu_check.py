"""What only a GPU can show, in under four minutes on one: `make gpu-check`.

    python -m benchmarks.gpu_check

Runs the tests marked `gpu`, the tiny job, and a decoder that fills the device for some steps (bf16, compiled, NCCL where
there are several GPUs), all through `paceline train`. Shows tokens per second, MFU against the measured matmul peak,
and planned memory against measured, and keeps the result in benchmarks/results/<date>-gpu.json. Without a GPU it says
so and ends with exit code 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import environment
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.startup import script
from paceline.cluster.probe import Host, probe_host
from paceline.run.records import read_records
from paceline.units import GiB, format_bytes, format_count

TEST_SECONDS, TINY_SECONDS, DECODER_SECONDS = 70.0, 60.0, 105.0
"""Limits of the three parts; together under four minutes."""

NO_TESTS = 5
"""pytest's exit code where no test is marked so."""

SEQUENCE = 2048
STEPS = 20
DECODERS = (
    (64 * GiB, ["model.preset=llama3.2-1b", "model.vocab_size=32768", "batch.global_batch={}"], 32),
    (20 * GiB, ["model.preset=gpt2-medium", "model.max_sequence_length=2048", "batch.global_batch={}"], 16),
    (0, ["model.preset=gpt2", "model.max_sequence_length=2048", "batch.global_batch={}"], 8),
)
"""Least device memory, model, and sequences per GPU and optimizer step: about a second a step on the GPUs of its year."""


def decoder_words(host: Host) -> list[str]:
    """A decoder that fills the smallest GPU here for about a second a step."""
    model, per_gpu = next((model, batch) for least, model, batch in DECODERS if host.device_memory_bytes >= least)
    words = [word.format(per_gpu * host.devices) for word in model]
    return [
        *words, f"data.sequence_length={SEQUENCE}", "data.eval_sequences=16", f"run.steps={STEPS}",
        "optimizer.lr=1e-4", "optimizer.warmup_steps=10", "parallel.precision=bf16", "parallel.compile=true",
    ]  # fmt: skip


def run_tests(limit: float) -> Figure:
    """The tests that need a CUDA device."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    code, printed, seconds = _run(command, limit)
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    if code == NO_TESTS:
        return Figure("tests marked gpu", "all pass", "there are none", None)
    if code != 0:
        say(printed[-4000:])
    return Figure("tests marked gpu", "all pass", f"{last.strip('= ')} ({seconds:.0f} s)", code == 0)


def train(name: str, words: list[str], folder: Path, procs: int, limit: float) -> dict[str, Any]:
    """`paceline train --json` on these words: its summary, and what its records add. `error` where it failed."""
    given = [*words, f"run.dir={json.dumps(str(folder))}", f"run.name={name}", "--procs", str(procs), "--json"]
    say(f"{name}: paceline train {' '.join(words)} --procs {procs}")
    code, printed, seconds = _run([*script("paceline"), "train", *given], limit)
    found: dict[str, Any] = {"words": words, "command_seconds": seconds, "exit": code}
    if code != 0:
        say(printed[-4000:])
        return {**found, "error": f"exit code {code} after {seconds:.0f} s"}
    for record in read_records(folder / name, kinds=("run_started", "step", "run_finished")):
        if record["kind"] == "step":
            found.setdefault("losses", []).append(record["loss"])
        else:
            found[record["kind"]] = record
    return found


def train_figures(name: str, found: dict[str, Any]) -> list[Figure]:
    """Speed, utilisation, memory and loss of a run."""
    if "error" in found:
        return [Figure(name, "ends well", found["error"], False)]
    started, finished, losses = found["run_started"], found["run_finished"], found["losses"]
    rate, mfu, peak = finished["tokens_per_second"], finished["mfu"], started["peak_flop_per_second"]
    falls = losses[-1] is not None and losses[-1] < losses[0]
    share = "mfu not known" if not (mfu and peak) else f"MFU {mfu:.1%} of {peak / 1e12:,.0f} TFLOP/s measured"
    graphs = f", {finished['recompiles']} recompilations" if finished.get("recompiles") is not None else ""
    speed = (
        f"{rate:,.0f} tokens/s, {share}, {format_count(started['parameters'])} parameters, {started['precision']}"
        f"{' compile' if started['compile'] else ''}, {started['world_size']} GPU(s){graphs}"
    )
    planned = started["planned_memory"]
    # torch counts what it allocated: without the CUDA context and without the allocator's slack.
    wanted = planned["total_bytes"] - planned["context_bytes"] - planned["reserve_bytes"]
    most = max(finished["peak_memory_bytes"])
    return [
        Figure(f"{name}: loss", "falls", f"{losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps", falls),
        Figure(f"{name}: speed", "", speed),
        Figure(
            f"{name}: planned over measured memory", "",
            f"{wanted / most:.2f}; {format_bytes(wanted)} planned, {format_bytes(most)} allocated at the peak",
        ),
    ]  # fmt: skip


def _run(command: list[str], limit: float) -> tuple[int, str, float]:
    """Exit code (124 past the limit), what was printed, seconds. The workers end with the command that started them."""
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        printed, _ = process.communicate(timeout=limit)
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            printed, _ = process.communicate(timeout=15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        code = 124
    return code, printed, time.monotonic() - began


def main() -> int:
    args = parser(__doc__).parse_args()
    host = probe_host()
    if host.device_kind != "cuda":
        say("gpu-check: there is no GPU here (nvidia-smi names none, or CUDA_VISIBLE_DEVICES hides them)")
        return 1
    say(f"gpu-check: {host.devices} x {host.device_name}, {format_bytes(host.device_memory_bytes)} each")
    began = time.monotonic()
    tiny = [str(ROOT / "examples" / "tiny.toml"), "run.steps=100", "data.eval_sequences=48"]
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-", dir=os.environ.get("TMPDIR")) as name:
        figures = [run_tests(TEST_SECONDS)]
        small = train("tiny", tiny, Path(name), 1, TINY_SECONDS)
        figures += train_figures("tiny job", small)
        large = train("decoder", decoder_words(host), Path(name), host.devices, DECODER_SECONDS)
        figures += train_figures("decoder", large)
    seconds = time.monotonic() - began
    figures.append(Figure("gpu-check itself", "< 240 s", f"{seconds:.0f} s", seconds < 240))
    code = finish("gpu", figures, {"tiny": small, "decoder": large}, args, decoder_words(host))
    return code or int(any(figure.reached is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
