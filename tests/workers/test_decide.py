"""Which of many failures is told."""

from __future__ import annotations

from typing import Any

from paceline.errors import DataError, Interrupted, JobError, OutOfMemory, PacelineError, Stalled, WorkerFailed
from paceline.workers import decide
from paceline.workers.decide import Decision, Ending
from paceline.workers.heartbeat import Beat
from paceline.workers.verdict import Verdict, cause_of


def told(rank: int, when: float, exit_code: int = 1, message: str = "bad", **rest: Any) -> Ending:
    error = {"kind": "ValueError", "message": message}
    verdict = Verdict(rank, "host", when, when, exit_code, **{"error": error, "step": 3, **rest})
    return Ending(rank, exit_code, when, verdict)


def decision(endings: list[Ending], stacks: dict[int, str] | None = None) -> Decision:
    found = decide.decide(endings, stacks or {})
    assert found is not None
    return found


# BL-74
def test_the_first_in_time_is_told() -> None:
    found = decision([told(0, 9.0), told(1, 8.0, message="bad sample 17", traceback="Traceback ...", where="x.py:4")])
    assert found.rank == 1
    assert str(found.error) == "rank 1 of 2 raised ValueError at step 3: bad sample 17 (x.py:4)"
    assert found.traceback == "Traceback ..."
    assert isinstance(found.error, WorkerFailed)


# BL-74: the echo of a death is often seen before the death itself.
def test_an_echo_never_hides_its_cause() -> None:
    echo = told(0, 1.0, cause="consequence", message="Connection closed by peer")
    timeout = told(1, 2.0, cause="timeout", message="Timed out waiting 100ms for recv operation")
    dead = Ending(2, -9, 3.0, None, beat=Beat(3, "forward", 0.0, 0.0, 8))
    found = decision([echo, timeout, dead])
    assert found.rank == 2
    assert "was ended at step 3 by signal 9 (SIGKILL): killed from outside, likely out of memory" in found.error.message


# BL-74
def test_a_collective_that_timed_out_names_itself_and_who_did_not_arrive() -> None:
    waited = [
        told(r, 5.0, cause="timeout", phase="reducing gradients", collective="all_reduce number 4") for r in (0, 1)
    ]
    asleep = Ending(2, None, 6.0, None, beat=Beat(3, "forward", 0.0, 0.0, 8))
    found = decision([*waited, asleep], {2: "stack of 2"})
    assert isinstance(found.error, Stalled) and found.error.exit_code == 76
    for words in ("ranks 0, 1 waited", "step 3", "all_reduce number 4", "rank 2 did not arrive", "in 'forward'"):
        assert words in found.error.message
    assert found.rank == 2 and found.traceback == "rank 2:\nstack of 2\n"


def test_a_timeout_of_all_ranks_says_so() -> None:
    found = decision([told(r, 5.0, cause="timeout", message="Timed out waiting\nmore") for r in (0, 1)])
    assert "ranks 0, 1 waited in vain" in found.error.message and "(Timed out waiting)" in found.error.message
    assert "slow or broken link" in str(found.error)


def test_a_job_error_of_all_ranks_is_told_as_it_is() -> None:
    record = JobError("does not divide", key="batch.global_batch", hint="Use 24.").to_record()
    found = decision([told(r, 1.0, 78, error=record, traceback=None) for r in (0, 1)])
    assert found.error.exit_code == 78 and found.traceback is None
    assert str(found.error) == "batch.global_batch: does not divide\n  Use 24."


def test_a_job_error_of_one_rank_names_the_rank() -> None:
    record = DataError("shard 3 is damaged").to_record()
    found = decision([told(0, 2.0, cause="consequence"), told(1, 1.0, 78, error=record)])
    assert isinstance(found.error, DataError) and str(found.error) == "rank 1: shard 3 is damaged"


def test_a_kill_that_the_kernel_counted_is_out_of_memory() -> None:
    found = decision([Ending(0, 0, 1.0, None), Ending(1, -9, 1.0, None, out_of_memory=True)])
    assert isinstance(found.error, OutOfMemory)
    assert "rank 1 of 2 was killed by the kernel" in found.error.message


def test_an_allocation_failure_is_out_of_memory() -> None:
    found = decision([told(0, 1.0, error={"kind": "RuntimeError", "message": "[enforce fail] can't allocate memory"})])
    assert isinstance(found.error, OutOfMemory)


# BL-30: a loader process that died is told with its signal, not as the timeout of the others.
def test_a_dead_loader_process_is_told_before_the_others_timeout() -> None:
    message = "DataLoader worker (pid 17) is killed by signal: Bus error."
    found = decision([told(0, 1.0, cause="consequence"), told(1, 2.0, message=message)])
    assert found.rank == 1 and message in found.error.message


def test_an_exit_without_a_word_keeps_its_code_and_quotes_what_it_printed() -> None:
    found = decision([Ending(0, 79, 1.0, None, tail=["no space left"])])
    assert found.error.exit_code == 79
    assert "ended with exit code 79; it printed last:\n    no space left" in found.error.message
    assert decision([Ending(0, 5, 1.0, None)]).error.exit_code == 1


def test_no_failure_is_no_decision() -> None:
    assert decide.decide([Ending(0, 0, 1.0, None), told(1, 1.0, 0, error=None)], {}) is None


def test_interruptions_say_by_what() -> None:
    error: PacelineError = decide.interrupted("Ctrl-C", [1], 10.0)
    assert isinstance(error, Interrupted) and "interrupted by Ctrl-C; nothing was saved; ranks 1 did not stop" in str(
        error
    )
    assert "interrupted by SIGTERM; nothing was saved" in str(decide.interrupted("SIGTERM", [], 10.0))


def test_the_words_of_the_engine_are_known() -> None:
    assert (
        cause_of(RuntimeError("[x/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"))
        == "timeout"
    )
    assert cause_of(RuntimeError("[x/pair.cc:547] Connection closed by peer [127.0.0.1]:5")) == "consequence"
    assert cause_of(RuntimeError("shape mismatch")) == "own"
    assert cause_of(JobError("Connection closed by peer")) == "own"
