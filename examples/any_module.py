"""Train a module of your own: `python any_module.py`, or on several processes `torchrun --nproc-per-node 2 any_module.py`.

The module draws a picture: from a point of the plane it learns how bright a ring is there. Nothing in it knows of ranks.
"""

import torch
from torch import Tensor, nn

import paceline


class Ring:
    """4096 points of the plane, each with the brightness of a ring around the middle."""

    def __init__(self) -> None:
        self.points_N2 = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def __len__(self) -> int:
        return len(self.points_N2)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point = self.points_N2[index]
        return {"inputs": point, "brightness": torch.exp(-20 * (point.norm() - 0.6) ** 2)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over the samples and their number: divided once, over all ranks."""
    errors = (output.squeeze(-1) - batch["brightness"]) ** 2
    return errors.sum(), torch.tensor(float(len(errors)))


def main() -> None:
    model = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
    trainer = paceline.Trainer(
        model, loss, data=Ring(), global_batch=256, run="runs/ring",
        optimizer={"lr": 3e-2, "warmup_steps": 10, "weight_decay": 0.0},
    )  # fmt: skip
    result = trainer.fit(steps=200)
    print(f"loss {result['loss']:.4f} after {result['steps']} steps; see: paceline report runs/ring")


if __name__ == "__main__":
    main()
