"""The machine of a published run: its device, its nodes and what joins them. Imports no torch."""

from __future__ import annotations

import re

import msgspec

from paceline.cluster.catalogue import fabric
from paceline.cluster.device import Device, Link
from paceline.plan.row_fields import Table, optional, positive

STANDARD_FABRICS = {"v100": "edr100", "a100": "hdr200", "h100": "ndr400", "h200": "ndr400", "h800": "ndr400",
                    "gh200": "ndr400", "b200": "ndr400", "gb200": "ndr400", "b300": "xdr800", "gb300": "xdr800"}  # fmt: skip
"""What joins the nodes of a device as its maker sells them: assumed where a run does not say."""

_DEVICES = (
    (r"TPU|Trainium|Gaudi|Ascend", ""),
    (r"model not named", ""),
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"GH200", "gh200"), (r"B300", "b300-sxm"), (r"B200", "b200-sxm"),
    (r"H200", "h200-sxm"), (r"H800", "h800-sxm"),
    (r"H100.*9[56]\s?GB", "h100-sxm-96g"), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100-sxm"),
    (r"A100.*PCI.*40", "a100-pcie-40g"), (r"A100.*PCI", "a100-pcie-80g"),
    (r"A100.*80\s?GB", "a100-sxm-80g"), (r"A100.*40\s?GB", "a100-sxm-40g"), (r"A100", "a100-sxm-80g"),
    (r"V100.*16", "v100-sxm-16g"), (r"V100", "v100-sxm-32g"), (r"L40S", "l40s"),
    (r"MI300X", "mi300x"), (r"MI355X", "mi355x"),
)  # fmt: skip


def device_key(name: str) -> str | None:
    """Key of the catalogue for a device as sources write it, or None: a device without a name or without an entry."""
    found = next((key for pattern, key in _DEVICES if re.search(pattern, name, re.IGNORECASE)), "")
    return found or None


def nodes_of(hardware: Table, gpus: int) -> tuple[int, int]:
    """Nodes and devices a node. The nodes of an NVL72 domain, joined by NVLink, count as one."""
    per_node = optional(hardware, "gpus_per_node") or 8
    if "NVL72" in str(hardware.get("intra_node") or ""):
        per_node = max(d for d in range(1, 73) if gpus % d == 0)
    per_node = min(per_node, gpus)
    return -(-gpus // per_node), per_node


def fabric_of(hardware: Table, found: Device, per_node: int, assumed: list[str]) -> Link:
    """What joins the nodes: the published rate on a network of its kind, or what its maker sells with the device."""
    words = str(hardware.get("inter_node") or "")
    kind = "opa" if "Omni-Path" in words else "roce" if re.search(r"roce", words, re.IGNORECASE) else ""
    kind = kind or ("efa" if "EFA" in words else "eth" if re.search(r"ethernet|tcp", words, re.IGNORECASE) else "ib")
    like = {"opa": "opa100", "roce": "roce400", "efa": "efa-p5", "eth": "eth100", "ib": "ndr400"}[kind]
    rate = positive(hardware, "inter_node_GBps_per_gpu")
    counted = re.search(r"(\d+)\s?x [^0-9]*(\d+)\s?Gb", words)
    rate = rate or None
    if rate is None and counted is not None:
        rate = int(counted[1]) * int(counted[2]) / 8 / per_node
    if rate is None:
        prefix = found.key.split("-")[0]
        key = STANDARD_FABRICS.get(prefix, "ndr400")
        rate = fabric(key, per_node).bytes_per_second / 1e9
        assumed.append(f"{rate:g} GB/s a device between nodes: not published, {key} as sold with {prefix}")
    shape = fabric(like, per_node)
    return msgspec.structs.replace(
        shape, name=f"{rate:g} GB/s a device like {like}", bytes_per_second=float(rate) * 1e9
    )
