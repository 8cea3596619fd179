"""Growth of peak memory of head and loss: logits whole against logits in chunks, each side in processes of its own.

    python -m benchmarks.chunked_loss

Forward and backward of the output head and the cross-entropy over one sequence, the gradients of both inputs counted.
Growth is what VmHWM rises over the resident set with the inputs made. The whole side is torch's linear layer and
cross-entropy on float32 logits; a second one is the product's own loss over whole logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from paceline.units import format_bytes, format_seconds

VOCABULARY, TOKENS, DIM = 131072, 2048, 512
TARGET = 4.0
REPEATS = 3
SIDES = ("torch", "whole", "chunked")

CHILD = """
import json, sys, time
import torch
import torch.nn.functional as F
from paceline.loss.chunked import head_cross_entropy
from paceline.loss.cost import CHUNK_LOGITS_BYTES
from paceline.loss.cross_entropy import token_cross_entropy

side, vocabulary, tokens, dim, bf16 = sys.argv[1], *map(int, sys.argv[2:])

def status(key):
    line = next(l for l in open("/proc/self/status") if l.startswith(key))
    return int(line.split()[1]) * 1024

def loss_of(h, weight, labels):
    if side == "chunked":
        rows = max(16, CHUNK_LOGITS_BYTES["cpu"] // (4 * vocabulary))
        return head_cross_entropy(h.bfloat16() if bf16 else h, weight, labels, rows)
    logits = F.linear(h, weight)
    if side == "torch":
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return token_cross_entropy(logits, labels)[0]

def run(h, weight, labels):
    with torch.autocast("cpu", torch.bfloat16, enabled=bool(bf16)):
        loss = loss_of(h, weight, labels)
    loss.backward()
    return float(loss)

def inputs(vocabulary, tokens):
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(1, tokens, dim, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, dim, generator=generator).mul_(0.02).requires_grad_()
    return h, weight, torch.randint(0, vocabulary, (1, tokens), generator=generator)

run(*inputs(64, 8))
given = inputs(vocabulary, tokens)
before, started = status("VmRSS"), time.perf_counter()
loss = run(*given)
seconds = time.perf_counter() - started
print(json.dumps({"growth_bytes": status("VmHWM") - before, "seconds": seconds, "loss": loss,
                  "grad_h": float(given[0].grad.norm()), "grad_weight": float(given[1].grad.norm())}))
"""


def measure(side: str, vocabulary: int, tokens: int, bf16: bool) -> dict[str, Any]:
    words = [side, str(vocabulary), str(tokens), str(DIM), str(int(bf16))]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True, timeout=300, cwd=ROOT
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures_of(name: str, found: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    growth = {side: sorted(r["growth_bytes"] for r in runs)[len(runs) // 2] for side, runs in found.items()}
    seconds = {side: min(r["seconds"] for r in runs) for side, runs in found.items()}
    apart = max(abs(found["chunked"][0][key] / found["torch"][0][key] - 1) for key in ("loss", "grad_h", "grad_weight"))
    ratios = {side: growth[side] / growth["chunked"] for side in ("torch", "whole")}
    shown = ", ".join(f"{side} {format_bytes(growth[side])} in {format_seconds(seconds[side])}" for side in SIDES)
    return [
        Figure(
            f"peak memory of head and loss, {name}",
            f">= {TARGET:g} x below whole logits",
            f"{ratios['torch']:.1f} x below torch's, {ratios['whole']:.1f} x below the whole loss; {shown}",
            ratios["torch"] >= TARGET,
        ),
        Figure(f"distance of value and gradient norms, {name}", "", f"{apart:.1e}"),
    ]


def main() -> int:
    args = parser(__doc__).parse_args()
    vocabulary, tokens, repeats = (8192, 256, 1) if args.quick else (VOCABULARY, TOKENS, REPEATS)
    figures, details = [], {}
    for name in ("fp32", "bf16"):
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for repeat in range(repeats):
            for side in SIDES:
                found[side].append(measure(side, vocabulary, tokens, name == "bf16"))
            say(f"  {name} {repeat + 1}: " + ", ".join(format_bytes(found[s][-1]["growth_bytes"]) for s in SIDES))
        figures += figures_of(f"vocabulary {vocabulary}, {tokens} tokens, dim {DIM}, {name}", found)
        details[name] = found
    return finish("chunked-loss", figures, details, args, [])


if __name__ == "__main__":
    sys.exit(main())
