"""The sequences that share a cycle, with their parameters and histories as the ops want them."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from specengine.kv_cache import KVCache
from specengine.ops.verify_tree import Accepted, SamplingTable, TokenHistory, VerifyWorkspace
from specengine.sequence import Sequence
from specengine.tree import DraftTree


class Batch:
    """Rebuilt whenever its members change; nothing in it outlives a change but the sequences themselves."""

    def __init__(self, sequences: Seq[Sequence], cache: KVCache, vocab: int) -> None:
        self.sequences = list(sequences)
        self.cache = cache.batch([s.pages for s in sequences], [len(s.tokens) - 1 for s in sequences])
        self.params = SamplingTable.of([s.params for s in sequences], [s.seed for s in sequences])
        self.history = self._history()
        self.workspace = VerifyWorkspace(len(self.sequences), vocab)
        # Else the most likely token of every node is all there is to know of its logits.
        self.reads_logits = any(s.params.reads_logits for s in sequences)

    def _history(self) -> TokenHistory:
        longest = max((s.prompt_length + s.limit for s in self.sequences), default=1)
        tokens = torch.zeros(len(self.sequences), longest, dtype=torch.int32)
        for row, sequence in zip(tokens, self.sequences, strict=True):
            row[: len(sequence.tokens)] = torch.tensor(sequence.tokens, dtype=torch.int32)
        return TokenHistory(
            tokens=tokens,
            length=torch.tensor([len(s.tokens) for s in self.sequences], dtype=torch.int32),
            prompt_length=torch.tensor([s.prompt_length for s in self.sequences], dtype=torch.int32),
        )

    def commit(
        self, trees: Seq[DraftTree], accepted: Accepted, scores: torch.Tensor, first_rows: Seq[int]
    ) -> list[list[int]]:
        """Gives every sequence its accepted tokens and bonus; cuts the paths where a sequence ended inside its run.

        Returns the tokens each sequence kept. scores: of the target's pass; first_rows: row of each sequence's root.
        """
        committed = []
        # numpy writes a few integers in a fraction of the time that a tensor takes
        history, lengths = self.history.tokens.numpy(), accepted.path_length.numpy()
        paths, bonuses = accepted.path.tolist(), accepted.bonus.tolist()
        for b, (sequence, tree) in enumerate(zip(self.sequences, trees, strict=True)):
            path, bonus = paths[b][: lengths[b]], bonuses[b]
            kept = sequence.commit([tree.tokens[node] for node in path[1:]], bonus)
            sequence.count_cycle(tree, min(len(kept), len(path) - 1))
            if sequence.params.trace:
                sequence.record_trace(tree, path, len(kept), bonus)
            if sequence.params.logprobs:
                rows = torch.tensor(path[: len(kept)]) + first_rows[b]
                sequence.record_logprobs(scores[rows.to(scores.device)].cpu(), kept)
            end = len(sequence.tokens)
            history[b, end - len(kept) : end] = kept
            lengths[b] = len(kept)
            committed.append(kept)
        self.history.length.add_(accepted.path_length)
        return committed
