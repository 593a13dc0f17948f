"""The draft policy of a drafter, and what reading costs it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specengine.draft_policy.cost_model import DEVICE_ROWS, ROWS, CycleCosts
from specengine.draft_policy.expert_reads import ExpertReads
from specengine.draft_policy.policy import DraftPolicy, Source
from specengine.drafters.drafter import Drafter
from specengine.drafters.policy_file import PolicyFile, learned_of, teach
from specengine.models.transformer import Transformer


def policy_of(
    drafter: Drafter,
    target: Transformer,
    costs: CycleCosts | None,
    sources: Sequence[Source],
    parts: Sequence[Drafter] = (),
) -> DraftPolicy:
    """Makes the policy of a drafter.

    costs: given ones; None: learned, and remembered by the next process.  sources: what proposes scored trees.
    parts: other drafters whose options change what is learned.
    """
    on_device = target.ops.on_device
    # Where captured cycles draft, a WidthPolicy chooses their width.
    adaptive = drafter.adaptive and not (on_device and drafter.drafts_in_cycle)
    most = drafter.max_nodes - 1
    if not adaptive or costs is not None:
        return DraftPolicy(sources, most, adaptive=adaptive, costs=costs)
    file = PolicyFile(target, (drafter, *parts))
    costs = CycleCosts(DEVICE_ROWS if on_device else ROWS, expert_reads(target))
    policy = DraftPolicy(sources, most, costs=costs, save=lambda policy: file.write(learned_of(policy)))
    teach(policy, file.read())
    return policy


def expert_reads(target: Transformer) -> ExpertReads | None:
    """Returns how many experts the target's passes are expected to read; None for a dense model.

    Processes of tensor_parallel read side by side. Its bytes are those of the first, which alone reads the head.
    """
    moe = target.config.moe
    if moe is None:
        return None
    return ExpertReads(moe.num_experts, moe.experts_per_token, target.expert_bytes() / target.weight_bytes())


@contextmanager
def charged(policy: DraftPolicy, number: int, tokens: int) -> Iterator[None]:
    """Charges a source with the seconds of the block, which reads a part of a prompt. tokens: of that part."""
    began = time.perf_counter()
    yield
    policy.charge(number, tokens, time.perf_counter() - began)
