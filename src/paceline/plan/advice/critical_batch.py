"""Past the critical batch size a larger batch, and so more devices for it, saves next to no steps.

With B tokens a step a run needs S_min (1 + B_crit / B) steps (McCandlish et al. 2018, arXiv 1812.06162): far below B_crit
twice the batch halves the steps, far above it changes nothing. B_crit is the gradient's noise scale, tr(Sigma) / |G|^2,
and grows as the loss falls: B_crit = 2e8 tokens / L^(1 / 0.21) (Kaplan et al. 2020, arXiv 2001.08361, equation 1.4), with
the loss in nats per token that the same paper expects of N parameters outside of the tables and D tokens (equation 1.5).
Fitted there on one data set and up to 1.5e9 parameters: good to a factor of about 2, so that the advice begins at twice
the figure.
"""

from __future__ import annotations

from paceline.model.spec import non_embedding_parameter_count
from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_count, format_percent

FACTOR = 2.0
"""How far the estimate may be off."""


def line(facts: Facts) -> Advice | None:
    tokens = facts.tokens
    if tokens is None:
        return None
    parameters = non_embedding_parameter_count(facts.spec)
    loss = expected_loss(parameters, tokens)
    critical = critical_batch_tokens(loss)
    batch = facts.batch_tokens
    if batch <= FACTOR * critical:
        return None
    length = facts.best.setting.sequence_length
    saved = 1 - (1 + critical / batch) / (1 + 2 * critical / batch)
    return Advice(
        "critical_batch",
        "This batch is past the critical one: more devices for a still larger batch buy next to nothing, and half the "
        f"batch needs few more steps. Consider batch.global_batch={max(1, round(critical / length))}.",
        f"B_crit = 2e8 / {loss:.2f}^(1/0.21) = {format_count(critical)} tokens at the loss {loss:.2f} expected of "
        f"{format_count(parameters)} parameters and {format_count(tokens)} tokens; a step has {format_count(batch)}, "
        f"{batch / critical:.1f}x as many. Twice half the batch saves {format_percent(saved)} of the steps, not half.",
        {"critical_batch_tokens": critical, "batch_tokens": batch, "expected_loss": loss, "steps_saved": saved},
        "McCandlish et al. 2018, arXiv 1812.06162; Kaplan et al. 2020, arXiv 2001.08361",
    )


def expected_loss(parameters: float, tokens: float) -> float:
    """Nats per token after `tokens`, by Kaplan et al. 2020, equation 1.5."""
    return float(((8.8e13 / parameters) ** (0.076 / 0.095) + 5.4e13 / tokens) ** 0.095)


def critical_batch_tokens(loss: float) -> float:
    """The critical batch in tokens at a loss in nats per token, by Kaplan et al. 2020, equation 1.4."""
    return float(2e8 / loss ** (1 / 0.21))
