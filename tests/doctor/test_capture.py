"""What is captured here, and what is read of tools that this machine may not have."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from paceline.doctor.capture import capture, files, gpu, nccl_log, network, processor, rdma, system
from paceline.doctor.check import Given
from paceline.doctor.examine import examine
from paceline.doctor.host import PARTS, NvLink, Xid
from paceline.workers import affinity


def test_a_capture_of_this_machine_holds_what_the_system_says(tmp_path: Path) -> None:
    host = capture({"checkpoint": tmp_path / "not" / "there"})
    assert host.name == os.uname().nodename
    assert host.cpu is not None and host.cpu.allowed == affinity.allowed_cpus()
    assert host.memory is not None and 0 < host.memory.available <= host.memory.total
    assert host.versions["paceline"] and host.versions["torch"]
    assert any(i.kind == "loopback" and "127.0.0.1" in i.addresses for i in host.interfaces)
    folder = host.folder("checkpoint")
    assert folder is not None and folder.free == pytest.approx(_free(tmp_path), rel=0.05) and folder.writable
    assert folder.write_rate is None
    assert set(host.missing) <= set(PARTS)


def _free(path: Path) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def test_a_probe_that_fails_leaves_the_others_and_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise files.NotThere("nvidia-smi did not answer within 8 s")

    monkeypatch.setattr(gpu, "gpus", fails)
    monkeypatch.setattr(processor, "memory", lambda: 1 / 0)
    host = capture()
    assert host.missing["gpus"] == "nvidia-smi did not answer within 8 s"
    assert host.missing["memory"] == "division by zero"
    assert host.memory is None and host.gpus == () and host.cpu is not None


def test_a_snapshot_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_PSK", "x" * 40)
    monkeypatch.setenv("NCCL_PROXY", "http://user:hidden@host/")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = system.environment_variables()
    assert found["NCCL_DEBUG"] == "WARN"
    assert not {"NCCL_PSK", "NCCL_PROXY", "AWS_SECRET_ACCESS_KEY", "HOME", "PATH"} & set(found)


def test_the_write_probe_times_bytes_that_reach_the_disk(tmp_path: Path) -> None:
    host = capture({"checkpoint": tmp_path}, write_probe=True)
    folder = host.folder("checkpoint")
    assert folder is not None and folder.write_rate is not None and folder.write_rate > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_told_with_its_holder() -> None:
    with socket.create_server(("", 0)) as listener:
        number = listener.getsockname()[1]
        taken = network.port(number)
        assert taken is not None and not taken.free and str(os.getpid()) in taken.holder
    free = network.port(number)
    assert free is not None and free.free
    assert network.port(None) is None


# BL-71
def test_a_name_that_does_not_resolve_is_told_with_its_reason() -> None:
    [peer] = network.peers(("no-such-host.invalid",))
    assert peer.name == "no-such-host.invalid" and not peer.address and peer.reason and peer.seconds < 15


def test_a_peer_that_listens_is_reached_and_one_that_does_not_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        [there] = network.peers((f"127.0.0.1:{port}",))
    [gone] = network.peers((f"127.0.0.1:{port}",))
    assert there.reachable and not gone.reachable and gone.reason


def test_rdma_ports_are_read_as_the_kernel_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "counters"):
        (port / folder).mkdir(parents=True)
    for name, text in {
        "state": "4: ACTIVE\n",
        "rate": "400 Gb/sec (4X NDR)\n",
        "link_layer": "Ethernet\n",
        "gids/0": "fe80:0000:0000:0000:0e42:a1ff:fe00:0001\n",
        "gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
        "gids/4": rdma.NO_GID + "\n",
        "gid_attrs/types/3": "RoCE v2\n",
        "gid_attrs/ndevs/3": "ens1\n",
        "counters/symbol_error": "12\n",
        "counters/link_downed": "0\n",
    }.items():
        (port / name).write_text(text)
    monkeypatch.setattr(rdma, "DEVICES", tmp_path)
    [found] = rdma.ports()
    assert (found.device, found.port, found.active, found.link, found.rate) == ("mlx5_0", 1, True, "Ethernet", 400e9)
    assert [g.index for g in found.gids] == [0, 3]
    assert found.gids[1].ipv4 and found.gids[1].type == "RoCE v2" and found.interface == "ens1"
    assert found.counters == {"symbol_error": 12}


def test_access_control_is_read_out_of_configuration_space() -> None:
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 0x148 << 20).to_bytes(4, "little")
    space[0x148:0x14C] = (0x000D | 0x200 << 20).to_bytes(4, "little")
    space[0x14E:0x150] = (0b11101).to_bytes(2, "little")
    assert rdma._acs_control(bytes(space)) == 0b11101
    assert rdma._acs_control(bytes(4096)) is None


SMI = """<?xml version="1.0" ?>
<nvidia_smi_log>
 <driver_version>570.86.15</driver_version>
 <gpu id="00000000:0F:00.0">
  <product_name>NVIDIA H100 80GB HBM3</product_name>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>Disabled</current_mig></mig_mode>
  <uuid>GPU-5e2e</uuid>
  <compute_mode>Default</compute_mode>
  <pci>
   <pci_gpu_link_info>
    <pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>1</current_link_gen></pcie_gen>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>8x</current_link_width></link_widths>
   </pci_gpu_link_info>
   <replay_counter>0</replay_counter>
  </pci>
  <fb_memory_usage><total>81559 MiB</total><used>520 MiB</used></fb_memory_usage>
  <utilization><gpu_util>3 %</gpu_util></utilization>
  <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
  <ecc_errors><volatile>
   <sram_correctable>7</sram_correctable>
   <sram_uncorrectable_parity>1</sram_uncorrectable_parity>
   <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
   <dram_correctable>4</dram_correctable>
   <dram_uncorrectable>2</dram_uncorrectable>
  </volatile></ecc_errors>
  <remapped_rows>
   <remapped_row_unc>1</remapped_row_unc>
   <remapped_row_pending>Yes</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
  </remapped_rows>
  <clocks_event_reasons>
   <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
   <clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>
   <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
  </clocks_event_reasons>
  <temperature><gpu_temp>91 C</gpu_temp><gpu_temp_slow_threshold>N/A</gpu_temp_slow_threshold></temperature>
  <gpu_power_readings>
   <current_power_limit>500.00 W</current_power_limit><default_power_limit>700.00 W</default_power_limit>
  </gpu_power_readings>
  <clocks><sm_clock>345 MHz</sm_clock></clocks>
  <applications_clocks><graphics_clock>Requested functionality has been deprecated</graphics_clock></applications_clocks>
  <max_clocks><sm_clock>1980 MHz</sm_clock></max_clocks>
  <processes><process_info>
   <pid>4242</pid><type>C</type>
   <process_name>/opt/bin/python train.py --key=hidden</process_name><used_memory>1024 MiB</used_memory>
  </process_info><process_info>
   <pid>1802</pid><type>G</type><process_name>Xwayland</process_name><used_memory>23 MiB</used_memory>
  </process_info></processes>
  <fabric><state>Completed</state><status>Success</status></fabric>
 </gpu>
</nvidia_smi_log>
"""


def test_a_gpu_is_read_out_of_what_the_driver_s_tool_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {
        "-q": SMI,
        "nvlink": "GPU 0: NVIDIA H100 (UUID: GPU-5e2e)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n",
    }
    monkeypatch.setattr(files, "printed", lambda words, seconds=0.0: printed[words[1]])
    monkeypatch.setattr(gpu, "_pci_gpus", lambda: [("0000:0f:00.0", "nvidia")])
    gpu._report.cache_clear()
    monkeypatch.setattr(gpu, "_asked", lambda: True)
    [found] = gpu.gpus()
    [process] = gpu.processes()
    gpu._report.cache_clear()
    assert (process.pid, process.gpu, process.name, process.memory >> 20) == (4242, "GPU-5e2e", "python", 1024)
    assert found.fabric == "Completed"
    assert (found.name, found.uuid, found.bus) == ("NVIDIA H100 80GB HBM3", "GPU-5e2e", "0000:0f:00.0")
    assert (found.memory >> 20, found.memory_used >> 20) == (81559, 520)
    assert (found.clock, found.clock_max, found.clock_set, found.temperature_slow) == (345.0, 1980.0, None, None)
    assert found.throttle == ("thermal, hardware",)
    assert (found.uncorrected, found.corrected, found.remapped_uncorrected) == (3, 11, 1)
    assert found.remap_pending and not found.remap_failed and found.ecc and found.persistence and not found.mig
    assert (found.pcie_width, found.pcie_width_max, found.pcie_generation, found.pcie_generation_max) == (8, 16, 1, 5)
    assert (found.power_limit, found.power_default, found.utilisation) == (500.0, 700.0, 3.0)
    assert found.nvlink == NvLink(2, 1, 26.562e9)


def test_a_driver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def hangs(words: list[str], seconds: float = 0.0) -> str:
        asked.append(words)
        raise files.NotThere("nvidia-smi did not answer within 8 s")

    monkeypatch.setattr(files, "printed", hangs)
    monkeypatch.setattr(gpu, "_asked", lambda: True)
    monkeypatch.setattr(gpu, "_pci_gpus", lambda: [("0000:0f:00.0", "nvidia")])
    gpu._report.cache_clear()
    host = capture()
    gpu._report.cache_clear()
    assert asked == [["nvidia-smi", "-q", "-x"]]
    assert {name: host.missing[name] for name in ("gpus", "topology", "processes")} == dict.fromkeys(
        ("gpus", "topology", "processes"), "nvidia-smi did not answer within 8 s"
    )
    found = examine(Given(hosts=(host,))).findings
    assert [f.found for f in found if f.id == "gpu-driver"] == [
        "the PCI bus shows 1 GPUs, no driver answers: nvidia-smi did not answer within 8 s"
    ]


def test_a_topology_matrix_is_read_as_it_is_drawn() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tNV18\tPIX\t0-51\t0\t\tN/A\n"
        "GPU1\tNV18\t X \tSYS\t52-103\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
    )
    assert gpu.parse_topology(text) == {
        "GPU0": {"GPU1": "NV18", "NIC0": "PIX"},
        "GPU1": {"GPU0": "NV18", "NIC0": "SYS"},
        "NIC0": {"GPU0": "PIX", "GPU1": "SYS"},
    }


def test_xids_are_read_out_of_the_kernel_log() -> None:
    text = (
        "[  12.3] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n"
        "[9042.1] NVRM: Xid (PCI:0000:0f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[9050.7] NVRM: Xid (PCI:0000:47:00): 63, Row Remapper: New row marked for remapping\n"
    )
    found = gpu.parse_xids(text)
    assert [(x.number, x.bus) for x in found] == [(79, "0000:0f:00"), (63, "0000:47:00")]
    assert found[1] == Xid(63, "0000:47:00", "Row Remapper: New row marked for remapping")


NCCL_LOG = """
node1:412:460 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
node1:412:460 [0] NCCL INFO NET/IB : No device found.
node1:412:460 [0] NCCL INFO Using network Socket
node1:412:460 [0] NCCL INFO Channel 00/0 : 3[3] -> 4[0] [receive] via NET/Socket/0
"""


# BL-73
def test_the_network_that_nccl_used_is_read_out_of_its_log(tmp_path: Path) -> None:
    pattern = str(tmp_path / "nccl.%h.%p")
    assert nccl_log.transports("") is None and nccl_log.transports(pattern) is None
    (tmp_path / "nccl.node1.412").write_text(NCCL_LOG)
    assert nccl_log.transports(pattern) == ("Socket",)
    (tmp_path / "nccl.node1.413").write_text("NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IBext_v8/0/GDRDMA\n")
    assert nccl_log.transports(pattern) == ("IBext_v8", "Socket")
