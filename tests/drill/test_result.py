"""The table and the verdict: a loss is loud, and a control that is survived is one."""

from __future__ import annotations

from typing import Any

from paceline.drill.result import Drill, NotRun, Trial


def trial(kind: str, survived: bool = True, **fields: Any) -> Trial:
    values = {
        "kind": kind, "survived": survived, "detect_seconds": 0.4, "recover_seconds": 2.5, "steps_redone": 3,
        "equal": survived, "attempts": 2, "why": () if survived else ("ended with 1, promised is 0",),
        "run_dir": f"runs/{kind}",
    }  # fmt: skip
    return Trial(**{**values, **fields})


def drilled(*trials: Trial, controls: tuple[Trial, ...] = ()) -> Drill:
    return Drill(
        job="tiny.toml", folder="runs/tiny-drill", procs=2, steps=24, seed=7, trials=trials, controls=controls,
        not_run=(NotRun("slow-link", "needs root"),), matrix={"stop": {"stopped": 1}}, blamed=(1, 1),
        save_stall_seconds=0.01, save_write_seconds=0.2, checkpoint_bytes=10**7, undisturbed_seconds=9.0, seconds=60.0,
        versions={},
    )  # fmt: skip


def test_all_survived_is_a_pass_with_the_longest_recovery() -> None:
    found = drilled(trial("kill"), trial("stop", recover_seconds=6.0), trial("nan", attempts=1, recover_seconds=None))
    document = found.document()
    assert (document["verdict"], document["exit"]) == ("pass", 0) and found.recover_seconds == 6.0
    for field in ("kind", "survived", "detect_seconds", "recover_seconds", "steps_redone", "equal"):
        assert field in document["trials"][0]
    assert list(document["not_run"]) == [{"kind": "slow-link", "reason": "needs root"}]
    text = found.describe()
    assert "verdict: pass, 3 of 3 faults survived" in text and "needs root" in text and "seed 7" in text


def test_one_loss_fails_and_says_why_and_where() -> None:
    found = drilled(trial("kill"), trial("stop", survived=False))
    assert (found.document()["verdict"], found.document()["exit"], found.document()["lost"]) == ("fail", 1, ["stop"])
    assert "stop: ended with 1, promised is 0" in found.describe() and "runs/stop.log" in found.describe()


def test_a_control_that_is_survived_fails() -> None:
    lost = drilled(trial("kill"), controls=(trial("kill", survived=False, without="restarts"),))
    blind = drilled(trial("kill"), controls=(trial("kill", without="restarts"),))
    assert lost.holds and not blind.holds and blind.document()["blind_controls"] == ["restarts"]
    assert "without restarts was survived" in blind.describe()
