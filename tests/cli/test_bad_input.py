"""What a user gets wrong: one clear message (values, key, reason, next command), the right code, no traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Completed, Launcher


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def refused(done: Completed, code: int, *texts: str) -> None:
    assert done.returncode == code, done.stderr[-2000:]
    for text in texts:
        assert text in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["nosuch.toml"], ["no job file at nosuch.toml"]),
        (["run.stpes=5"], ["run.stpes", "unknown key", "Did you mean run.steps?"]),
        (["run.steps=many"], ["run.steps", "'many'", "not a whole number"]),
        (["model.preset=tinny"], ["tinny", "tiny"]),
        (["model.num_heads=3"], ["num_heads", "128"]),
        (["batch.global_batch=7", "--procs", "2"], ["7 sequences do not divide over 2", "6 or 8 would divide"]),
        (["batch.microbatch=5", "--procs", "2"], ["micro-batch of 5", "12 sequences per rank", "1 or 2 or 3"]),
        (["parallel.tp=3", "--procs", "3"], ["parallel.tp", "4"]),
        (["optimizer.momentum=0.9"], ["optimizer.momentum", "no effect on adamw", "optimizer.name=sgd"]),
        (["optimizer.lr_scaling=linear"], ["lr_reference_batch"]),
        (["data.source=gone.txt"], ["data.source", "gone.txt"]),
        (["data.source=empty.txt"], ["empty.txt"]),
        (["data.tokenizer=none.json"], ["none.json"]),
        (["data.sequence_length=4096"], ["data.sequence_length", "4096", "1024"]),
        (["parallel.zero_stage=2", "--procs", "1"], ["parallel.zero_stage", "no effect", "dp_shard = 1", "one rank"]),
        (["parallel.zero_stage=2", "--procs", "2"], ["parallel.zero_stage", "2 ranks", "parallel.dp_shard=2"]),
        (["parallel.zero_stage=4"], ["parallel.zero_stage", "4"]),
        (["parallel.dp_shard=3", "--procs", "4"], ["dp_shard 3 = 3", "4 ranks", "1 or 2 or 4"]),
        (["parallel.dp_replicate=1", "parallel.dp_shard=2", "--procs", "4"], ["does not equal the 4 ranks"]),
        (["parallel.reduce_every=microbatch", "--procs", "2"], ["reduce_every", "dp_shard = 1", "whole gradients"]),
        (["parallel.reduce_every=step", "--procs", "1"], ["reduce_every", "no effect"]),
        (["parallel.reduce_dtype=bf16", "--procs", "1"], ["parallel.reduce_dtype", "no effect on one data rank"]),
        (["parallel.dp_shard=2", "parallel.overlap=false", "--procs", "2"], ["parallel.overlap", "no effect"]),
        (
            [
                "parallel.dp_shard=2",
                "parallel.zero_stage=1",
                "parallel.reduce_dtype=bf16",
                "batch.microbatch=2",
                "--procs",
                "2",
            ],
            ["parallel.reduce_dtype", "in bf16", "reduce_every=microbatch"],
        ),
        (["parallel.precision=fp64", "parallel.reduce_dtype=fp32"], ["parallel.reduce_dtype", "no effect"]),
        (["optimizer.decay_steps=5"], ["optimizer.decay_steps", "no effect"]),
    ],
)
def test_a_wrong_job_is_refused_before_anything_starts(
    launch: Launcher, tmp_path: Path, words: list[str], texts: list[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    refused(launch(["train", *words], timeout=60), 78, *texts)


def test_wrong_usage_is_2_and_names_the_nearest(launch: Launcher) -> None:
    refused(launch(["trian"]), 2, "no command 'trian'", "Did you mean paceline train?")
    refused(launch(["train", "--prosc", "2"]), 2, "--prosc", "paceline train --help")
    refused(launch(["train", "--procs", "0"]), 2, "--procs 0 starts nothing")
    refused(launch(["plan", "--fixed", "--write"]), 2, "--fixed has no effect")
    refused(launch(["plan", "--fixed", "--cluster", "1x8xh100-sxm", "--procs", "2"]), 2, "--procs 2 has no effect")
    refused(launch(["plan", "--fixed", "--cluster", "8h100"]), 2, "8h100", "NODESxDEVICESxDEVICE")
    refused(launch(["plan", "--fixed", "--cluster", "8xh100"]), 2, "no node type", "Did you mean dgx-h100?")
    refused(launch(["plan", "--fixed", "--cluster", "1x8xh10-sxm"]), 2, "Did you mean h100-sxm?")


def test_a_failure_prints_one_json_document(launch: Launcher) -> None:
    done = launch(["train", "batch.global_batch=7", "--procs", "2", "--json"])
    document = json.loads(done.stdout)
    assert document["schema"] == "paceline.train/1" and document["exit"] == done.returncode == 78
    error = document["error"]
    assert error["key"] == "batch.global_batch" and error["values"]["global_batch"] == 7
    assert "do not divide" in error["reason"] and error["next"].startswith("Take batch.global_batch=")
    usage = launch(["plan", "--write", "--json"])
    assert json.loads(usage.stdout)["exit"] == usage.returncode == 2


def test_a_plan_that_does_not_fit_says_why_and_ends_1(launch: Launcher) -> None:
    done = launch(["plan", "model.preset=llama3-8b", "--fixed", "--cluster", "1x8xh100-sxm", "--json"])
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["chosen"]["fits"] is False
    memory = document["chosen"]["memory"]["stages"][0]
    assert memory["moments_bytes"] == pytest.approx(2 * memory["parameters_bytes"], rel=1e-6)
    assert "per rank are needed" in document["rejected"][0]["reason"]


def test_explain_prints_origins_and_starts_nothing(launch: Launcher, tmp_path: Path) -> None:
    done = launch(["train", "run.steps=30", "--explain", "--procs", "2"])
    assert done.returncode == 0
    assert "steps = 30 # command line" in done.stdout
    assert "microbatch = 12 # derived" in done.stdout
    assert "seed = 0 # default" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_a_sequence_longer_than_the_data_is_refused(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("too short")
    done = launch(["train", *SMALL, "data.eval_fraction=0", "--procs", "1"], timeout=60)
    refused(done, 78, "data.sequence_length", "32")


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(launch: Launcher, text: Path) -> None:
    done = launch(["train", *SMALL, "model.vocab_size=128", "--procs", "1"], timeout=60)
    refused(done, 78, "model.vocab_size", "257", "128", "model.vocab_size=320")


def test_an_unreadable_source_is_refused(launch: Launcher, text: Path) -> None:
    (text / "text.txt").write_bytes(b"\xff\xfe\x00broken\x80" * 100)
    refused(launch(["train", *SMALL, "--procs", "1"], timeout=60), 78, "text.txt")


def test_a_port_in_use_is_named_with_its_holder(launch: Launcher, text: Path) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        done = launch(["train", *SMALL, f"launch.port={port}"], timeout=30)
    refused(done, 78, f"{port}", f"{os.getpid()}", "launch.port")


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_79_and_names_the_folder(launch: Launcher, text: Path) -> None:
    full = text / "full"
    full.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount tmpfs: {mounted.stderr.decode()}")
    try:
        done = launch(["train", *SMALL, "run.dir=full", "run.steps=3", "--procs", "1"], timeout=60)
    finally:
        subprocess.run(["umount", str(full)], check=True)
    refused(done, 79, "48.0 KiB are free", "full", "checkpoint.dir")
