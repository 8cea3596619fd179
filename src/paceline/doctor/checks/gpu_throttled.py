"""GPUs whose clocks are held down by heat, by power, or by hand."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Gpu, Host

CLOCK_SHARE = 0.95
POWER_SHARE = 0.95
SEVERE = ("thermal, hardware", "power brake", "hardware slowdown", "thermal, driver")


def look(host: Host, given: Given) -> Iterator[Found]:
    for gpu in host.gpus:
        yield from _gpu(gpu)


def _gpu(gpu: Gpu) -> Iterator[Found]:
    name = f"GPU {gpu.index} ({gpu.uuid or gpu.bus})"
    held = [reason for reason in gpu.throttle if reason in SEVERE]
    if held:
        clocks = f", {gpu.clock:.0f} of {gpu.clock_max:.0f} MHz" if gpu.clock and gpu.clock_max else ""
        heat = f", {gpu.temperature:.0f} C" if gpu.temperature is not None else ""
        yield Found(
            found=f"{name} is slowed: {', '.join(held)}{clocks}{heat}",
            mend="check fans, airflow and inlet temperature, and the power supplies; drain the host meanwhile",
            severity="error",
        )
    # Against the default: some kinds reach more than their default application clock by themselves.
    if gpu.clock_set and gpu.clock_default and gpu.clock_set < CLOCK_SHARE * gpu.clock_default:
        yield Found(
            found=f"{name}: application clock {gpu.clock_set:.0f} MHz, its default is {gpu.clock_default:.0f} MHz",
            mend=f"nvidia-smi -i {gpu.index} -rac",
            why=f"products run up to {gpu.clock_default / gpu.clock_set:.2f} times slower, and all ranks wait for it",
        )
    if gpu.power_limit and gpu.power_default and gpu.power_limit < POWER_SHARE * gpu.power_default:
        yield Found(
            found=f"{name}: power limit {gpu.power_limit:.0f} W, its default is {gpu.power_default:.0f} W",
            mend=f"nvidia-smi -i {gpu.index} -pl {gpu.power_default:.0f}",
            why=f"under load it holds {gpu.power_limit / gpu.power_default:.0%} of its power, and all ranks wait for it",
        )


CHECK = Check(
    id="gpu-throttled",
    severity="warning",
    title="A GPU is slowed by heat, power or a clock set by hand",
    why="one slow GPU holds up all ranks: at half its clock every step of every rank takes about 2 times as long",
    mend="check cooling and power; nvidia-smi -rac",
    source="NVML documentation, clocks event reasons",
    needs=("gpus",),
    gpus=True,
    look=look,
)
