"""The requests of one call: n samples of each of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.engine.request import Request
from specengine.rules import Rule
from specengine.types import Outputs


@dataclass(frozen=True)
class RequestGroup:
    """The samples of each prompt, in order.  single: the caller gave one prompt instead of a list."""

    samples: Sequence[Sequence[Request]]
    single: bool

    @property
    def requests(self) -> list[Request]:
        """All requests, prompt by prompt."""
        return [request for samples in self.samples for request in samples]

    def outputs(self, rule: Rule) -> Outputs:
        """Returns the outputs of finished requests in the shape of the call; see Engine.generate."""
        results = []
        for samples in self.samples:
            outputs = [request.output(request.text.take(), rule) for request in samples]
            results.append(outputs[0] if samples[0].params.n == 1 else outputs)
        return results[0] if self.single else results
