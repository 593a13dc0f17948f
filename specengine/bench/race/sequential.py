"""Cascades without speculation, the baselines of speculative cascades.

`token-cascade:chow,alpha=A` takes a token of the draft model if its largest probability is at least 1 - A, else the
token of the target. `seq-cascade:chow,alpha=A` keeps the draft model's answer if the mean log-probability of its tokens
is at least log(1 - A), else the target answers again. Both are baselines of Narasimhan et al. (arXiv 2405.19261).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specengine.drafters import load_drafter
from specengine.drafters.draft_model.drafter import DraftModel
from specengine.engine.engine import Engine
from specengine.rules.base import check_choice, check_number
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import GenerationOutput, GenerationStats, SamplingParams
from specengine.utils.spec_string import Spec

LONGEST = 63  # tokens that the small model generates in a row


@dataclass(frozen=True)
class Config:
    """Holds the options of a sequential cascade.

    deferral: `chow` alone, because the other rules compare both models' distributions.
    alpha: largest distance from 1 of the probability of a token that the small model keeps.
    """

    deferral: str = "chow"
    alpha: float = 0.3

    def __post_init__(self) -> None:
        check_choice("deferral", self.deferral, ("chow",))
        check_number("alpha", self.alpha, 0, 1)


def is_sequential(rule: str) -> bool:
    """Returns whether a description names a sequential cascade."""
    return rule.partition(":")[0].strip() in _KINDS


def open_sequential(model: LoadedModel, drafter: str, rule: str, max_batch_size: int) -> Engine | SeqCascade:
    """Opens a sequential cascade. Raises ValueError for a drafter other than `draft-model`, and for unknown options."""
    name, _, options = rule.partition(":")
    options = options if not options or "=" in options.partition(",")[0] else f"deferral={options}"
    config = Spec.parse(",".join(part for part in (name, options) if part), "rule").build(Config, "rule")
    if Spec.parse(drafter, "drafter").name.replace("_", "-") != "draft-model":
        raise ValueError(f"rule: {name} needs the drafter draft-model, got {drafter!r}")
    return _KINDS[name.strip()](model, drafter, config, max_batch_size)


def _token_cascade(model: LoadedModel, drafter: str, config: Config, max_batch_size: int) -> Engine:
    """Opens an engine whose cycle is a token cascade.

    The drafter drafts a chain until it is unsure, rule `cascade:chow` accepts that chain, and the target adds the bonus
    token. The target also generates a request's last token, and the token after LONGEST sure ones.
    """
    spec = Spec.parse(drafter, "drafter")
    if "tree" in spec.options:
        raise ValueError(f"rule: token-cascade takes a draft model without a tree, got {drafter!r}")
    own = {"length": str(LONGEST), "confidence": str(1 - config.alpha), "adaptive": "false"}
    drafter = str(replace(spec, options={**spec.options, **own}))
    rule = f"cascade:chow,alpha={config.alpha}"
    return Engine(model, drafter=drafter, rule=rule, max_batch_size=max_batch_size, prefix_cache_mib=0)


class SeqCascade:
    """Runs the engine of the small model, then the engine of the target for the answers that are unsure."""

    def __init__(self, model: LoadedModel, drafter: str, config: Config, max_batch_size: int) -> None:
        draft_model = load_drafter(drafter, model.target)
        assert isinstance(draft_model, DraftModel)
        small = replace(model, name=drafter, target=draft_model.model)
        self.model = model
        self._least_logprob = math.log(1 - config.alpha) if config.alpha < 1 else -math.inf
        self._small = Engine(small, drafter="none", max_batch_size=max_batch_size, prefix_cache_mib=0)
        self._large = Engine(model, drafter="none", max_batch_size=max_batch_size, prefix_cache_mib=0)

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[GenerationOutput]:
        """Returns an output per prompt of token ids, as Engine.generate."""
        begin = time.perf_counter()
        drafts = self._small.generate(list(prompts), replace(params, logprobs=1))
        spent = time.perf_counter() - begin
        outputs = [self._accepted(output) for output in drafts]
        unsure = [i for i, output in enumerate(drafts) if not self._is_sure(output)]
        again = self._large.generate([prompts[i] for i in unsure], params) if unsure else []
        for i, output in zip(unsure, again, strict=True):
            later = [(seconds + spent, count) for seconds, count in output.stats.deliveries]
            outputs[i] = _charged(output, replace(output.stats, deliveries=later), drafts[i].stats)
        return outputs

    def _is_sure(self, output: GenerationOutput) -> bool:
        logprobs = [each.logprob for each in output.logprobs or ()]
        return sum(logprobs) / len(logprobs) >= self._least_logprob

    def _accepted(self, output: GenerationOutput) -> GenerationOutput:
        # The answer is judged as a whole, so all its tokens are delivered together.
        at_once = [(output.stats.prefill_seconds + output.stats.decode_seconds, len(output.token_ids))]
        stats = GenerationStats(lossless=False, deliveries=at_once)
        return _charged(replace(output, logprobs=None, trace=[]), stats, output.stats)


def _charged(output: GenerationOutput, stats: GenerationStats, small: GenerationStats) -> GenerationOutput:
    """Returns an output with the target's statistics, and the time of the small model as the phase `draft`."""
    phases = {**stats.seconds_by_phase, "draft": small.prefill_seconds + small.decode_seconds}
    return replace(output, stats=replace(stats, rule="seq-cascade", lossless=False, seconds_by_phase=phases))


_KINDS: dict[str, Callable[[LoadedModel, str, Config, int], Engine | SeqCascade]] = {
    "token-cascade": _token_cascade,
    "seq-cascade": SeqCascade,
}
