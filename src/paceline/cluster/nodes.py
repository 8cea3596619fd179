"""Nodes as they are sold: which device, how many, which network. Imports no torch.

One TOML file a type in `catalog/nodes/`, with its source. A cloud's own name of the type works too, in any case and with
`_` for `-`.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from paceline.config import nearest
from paceline.errors import UsageError
from paceline.units import parse_bytes

NODES = Path(__file__).parent / "catalog" / "nodes"


class NodeType(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node as sold.

    device, fabric: keys of the catalogue. nics: network interfaces for devices. host_memory: as text with a unit.
    watts: at most, of the whole node; None where the seller does not say.
    """

    name: str
    provider: str
    device: str
    devices: int
    nics: int
    fabric: str
    host_cores: int
    host_memory: str
    source: str
    watts: float | None = None
    aliases: tuple[str, ...] = ()
    key: str = ""

    @property
    def host_memory_bytes(self) -> int:
        return parse_bytes(self.host_memory)


def node_names() -> list[str]:
    """Keys of all node types, sorted."""
    return sorted(path.stem for path in NODES.glob("*.toml"))


@cache
def find_node(key: str) -> NodeType | None:
    """A node type by its key or another name of it, or None."""
    wanted = key.lower().replace("_", "-")
    path = NODES / f"{wanted}.toml"
    if path.is_file():
        return _read(path)
    return next((node for node in map(node_type, node_names()) if wanted in node.aliases), None)


def node_type(key: str) -> NodeType:
    """A node type by its key.

    Raises:
        UsageError: there is none; names the nearest.
    """
    path = NODES / f"{key}.toml"
    if not path.is_file():
        raise unknown_node(key)
    return _read(path)


def unknown_node(key: str) -> UsageError:
    """There is no such node type."""
    names = node_names()
    near = nearest(key.lower().replace("_", "-"), names)
    return UsageError(
        f"no node type {key!r} in the catalogue",
        key="--cluster",
        values={"node": key, "known": names},
        hint=f"Did you mean {near}?" if near else f"Known: {', '.join(names)}.",
    )


@cache
def _read(path: Path) -> NodeType:
    found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), NodeType)
    return msgspec.structs.replace(found, key=path.stem)
