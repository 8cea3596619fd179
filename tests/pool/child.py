"""One worker process of the pool: waits for calls, runs each as one rank of a fresh Gloo group, sends back the result.

    python -m tests.pool.child CONNECTION_FD PARENT_PID STACKS_FILE

Messages from the parent are `Call`, then "release" once every rank has finished; None ends the process.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.workers.lifeline import die_with_parent
from tests.pool.messages import STACK_SIGNAL, Call, Outcome

LOCAL_CHARACTERS = 300


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    with Path(sys.argv[3]).open("w") as stacks:
        faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
        faulthandler.enable(file=sys.stderr)
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        connection.send("ready")
        while (call := connection.recv()) is not None:
            _serve(connection, call)


def _serve(connection: Connection, call: Call) -> None:
    with _environment(call):
        outcome = _run(call)
        if not outcome.ok:
            # Peers inside a collective learn of it by the closed connection instead of by their timeout.
            _leave_group()
        connection.send(outcome)
        # Leaving early would close connections that a slower rank still reads from.
        connection.recv()
        _leave_group()
    connection.send("clean")


def _run(call: Call) -> Outcome:
    try:
        _fresh_state()
        if call.group:
            _join_group(call)
        function = _resolve(call)
        result = function(call.rank, call.world_size, *pickle.loads(call.payload))
        return Outcome(True, time.monotonic(), pickle.dumps(result), "")
    except BaseException as error:
        when = time.monotonic()
        text = _describe(error, call.file)
        error.__traceback__ = None
        return Outcome(False, when, _pickled(error), text)


def _join_group(call: Call) -> None:
    import torch.distributed as dist

    from paceline.workers.gloo import run_one_at_a_time

    run_one_at_a_time()
    # A file store: no port, and nothing left of an earlier call.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(call.store_file, call.world_size),
        rank=call.rank,
        world_size=call.world_size,
        timeout=datetime.timedelta(seconds=call.collective_timeout),
    )


def _leave_group() -> None:
    import torch.distributed as dist

    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _fresh_state() -> None:
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
    if (dtensor_random := sys.modules.get("torch.distributed.tensor._random")) is not None:
        dtensor_random._rng_tracker = None


@contextlib.contextmanager
def _environment(call: Call) -> Iterator[None]:
    """`call.env` and torchrun's names while the call runs; environment, folder and import path put back after it."""
    env, cwd, path = dict(os.environ), Path.cwd(), list(sys.path)
    ranks = {"RANK": call.rank, "LOCAL_RANK": call.rank, "WORLD_SIZE": call.world_size}
    os.environ.update({name: str(value) for name, value in ranks.items()} | call.env)
    sys.path[:] = call.path
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        sys.path[:] = path


def _resolve(call: Call) -> Callable[..., Any]:
    try:
        module = importlib.import_module(call.module)
    except ModuleNotFoundError as error:
        if error.name is None or not call.module.startswith(error.name):
            raise
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    found: Any = module
    for name in call.qualname.split("."):
        found = getattr(found, name)
    return found  # type: ignore[no-any-return]


def _describe(error: BaseException, file: str) -> str:
    """The traceback, and the variables of the innermost frame in the test's own file: a bare assert tells nothing."""
    lines = traceback.format_exception(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    if isinstance(error, AssertionError) and frames:
        lines.append(f"variables of {frames[-1].f_code.co_name}:\n")
        lines += [f"  {name} = {_short(value)}\n" for name, value in frames[-1].f_locals.items()]
    return "".join(lines)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= LOCAL_CHARACTERS else text[:LOCAL_CHARACTERS] + " ..."


def _pickled(error: BaseException) -> bytes:
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return b""
    return payload


if __name__ == "__main__":
    main()
