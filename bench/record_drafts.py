"""Records what drafters would draft at every position of texts: python bench/record_drafts.py OUT.json.gz.

tests/draft_policy replays the file without clocks. The texts are greedy answers of smollm2-135m to the bench's own
questions. The target verifies nothing, so a draft stands at every position.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specengine import Engine, SamplingParams
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.combine.drafter import Combine, Config
from specengine.tensor_parallel.loading import load_model

PARTS = "eagle3;levels=5;top_k=3;beam=1;nodes=16;adaptive=false+suffix"
TOKENS = 64
KINDS = ("edit", "reasoning", "writing", "extraction", "code", "advice")
QUESTIONS = Path(__file__).parent.parent / "specengine/bench/data/prompts.jsonl"


class Recorder(Combine):
    """Drafts nothing, and keeps what its parts would draft: by position, by part."""

    drafts: list[list[Any]]

    def draft(self, requests: Sequence[Any]) -> Draft:
        self.drafts.append([_plain(part, part.propose(requests, 1e-9)[0], requests[0]) for part in self.parts])
        return Draft(requests, [DraftTree(request.tokens[-1:], [-1]) for request in requests])


def _plain(part: Any, tree: ScoredTree, request: Any) -> list[list[Any]]:
    """Returns tokens, parents and chances without the root; a network's own chances rather than the learned ones."""
    own = request.drafter_states.get(getattr(part, "calibrated", None), tree)
    return [list(own.tokens[1:]), list(own.parents[1:]), [round(chance, 3) for chance in own.chances[1:]]]


def main(out: str) -> None:
    model = load_model("smollm2-135m")
    drafter = Recorder(Config(adaptive=False), PARTS, model.target)
    engine = Engine(model, drafter=drafter)
    texts = []
    for line in QUESTIONS.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        if question["category"] not in KINDS:
            continue
        drafter.drafts = []
        output = engine.generate(
            [{"role": "user", "content": question["turns"][0]}], SamplingParams(max_new_tokens=TOKENS)
        )
        texts.append({"category": question["category"], "tokens": output.token_ids, "drafts": drafter.drafts})
    lines = ",\n".join(json.dumps(text, separators=(",", ":")) for text in texts)
    Path(out).write_bytes(gzip.compress(f"[\n{lines}\n]\n".encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
