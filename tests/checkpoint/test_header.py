"""Files of pieces are safetensors files: the library that defined the format reads them."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from paceline.checkpoint.header import ALIGN_BYTES, Entry, entry_name, safetensors_header

TENSORS = [
    (entry_name("model/embed.weight", (512, 0)), "F32", torch.arange(15, dtype=torch.float32).reshape(3, 5)),
    (entry_name("optimizer/step/x", ()), "F32", torch.tensor(7.0)),
    (entry_name("model/half", (3,)), "BF16", torch.arange(7, dtype=torch.bfloat16)),
    (entry_name("buffer/0/ids", (0, 4)), "I64", torch.arange(387).reshape(129, 3)),
    (entry_name("empty", (0, 0)), "F32", torch.empty(0, 4)),
]


def entries() -> list[Entry]:
    listed, begin = [], 0
    for name, dtype, tensor in TENSORS:
        listed.append(Entry(name, dtype, tuple(tensor.shape), begin, begin + tensor.nbytes))
        begin += tensor.nbytes
    return listed


def test_safetensors_opens_a_file_with_our_header(tmp_path: Path) -> None:
    header = safetensors_header(entries())
    data = b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for _, _, tensor in TENSORS)
    file = tmp_path / "rank-00000.safetensors"
    file.write_bytes(header + data)
    with safe_open(file, framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(name for name, _, _ in TENSORS)
        for name, _, tensor in TENSORS:
            assert torch.equal(opened.get_tensor(name), tensor) and opened.get_tensor(name).dtype == tensor.dtype


@pytest.mark.parametrize("count", range(5))
def test_data_begins_at_a_multiple_of_64_bytes(count: int) -> None:
    header = safetensors_header(entries()[:count])
    assert len(header) % ALIGN_BYTES == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8


def test_names_carry_the_offset() -> None:
    assert entry_name("model/w", (512, 0)) == "model/w@512,0"
    assert entry_name("optimizer/step/w", ()) == "optimizer/step/w@"


def test_two_pieces_with_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="same name"):
        safetensors_header([*entries(), entries()[0]])
