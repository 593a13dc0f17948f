"""Bugs of the package: room -> (test files that are run first, {name: (file, text, text in its place)})."""

BUGS = {
    "page pool": (
        "tests/cache/*.py tests/engine/test_shared_pages.py tests/engine/test_prefix_service.py "
        "tests/engine/test_unread_requests.py tests/engine/test_prefix_hits.py",
        {
            "room for one token less": (
                "specengine/cache/kv_cache.py",
                "            count = -(-slots // PAGE_SIZE)",
                "            count = slots // PAGE_SIZE",
            ),
            "freed pages stay promised": (
                "specengine/cache/kv_cache.py",
                "            self._promised -= len(pages)\n",
                "",
            ),
            "companions keep the old page": (
                "specengine/cache/kv_cache.py",
                "pool.copy_page(page, known)",
                "pool.copy_page(known, page)",
            ),
            "gives memory back while requests hold pages": (
                "specengine/cache/kv_cache.py",
                "if not self.fixed and not self._promised:",
                "if not self.fixed:",
            ),
            "gives the memory of the next pages back": (
                "specengine/cache/page_pool.py",
                "layer[first : last + 1]",
                "layer[first : last + 2]",
            ),
        },
    ),
    "prefix cache": (
        "tests/cache/test_prefix_cache.py tests/engine/test_prefix_hits.py tests/cache/test_state_pool.py",
        {
            "key lacks the token after the page": (
                "specengine/cache/prefix_cache.py",
                "text[start : start + size + 1]",
                "text[start : start + size]",
            ),
            "unfilled pages are found": (
                "specengine/cache/prefix_cache.py",
                "child is None or (filled and not child.filled)",
                "child is None",
            ),
            "held page can be evicted": (
                "specengine/cache/prefix_cache.py",
                "            self._unused.pop(page, None)\n",
                "",
            ),
            "first page of a text goes first": (
                "specengine/cache/prefix_cache.py",
                "for page in reversed(pages):",
                "for page in pages:",
            ),
            "state of the page before": (
                "specengine/cache/state_pool.py",
                "self.memory.copy(self._kept[pages[shared - 1]], slot)",
                "self.memory.copy(self._kept[pages[0]], slot)",
            ),
            "new request gets an old state": (
                "specengine/cache/state_pool.py",
                "            self.memory.clear(slot)",
                "            pass",
            ),
        },
    ),
    "scheduler": (
        "tests/engine/test_leaving.py tests/engine/test_service.py tests/engine/test_engine.py "
        "tests/engine/test_prompts_together.py tests/engine/test_failing.py tests/engine/test_hybrids.py",
        {
            "cancelled request stays in the queue": (
                "specengine/engine/scheduler.py",
                "deque(r for r in self._waiting if not r.finish_reason)",
                "deque(self._waiting)",
            ),
            "batch survives a new request": (
                "specengine/engine/scheduler.py",
                "                self._close_batch()\n                self._running += cached",
                "                self._running += cached",
            ),
            "released while it is read": (
                "specengine/engine/scheduler.py",
                "        self._release(self._prefill.take_ended())\n        self._remove_finished()",
                "        self._remove_finished()",
            ),
            "one request more than the batch holds": (
                "specengine/engine/scheduler.py",
                "len(admitted) == core.max_batch_size",
                "len(admitted) > core.max_batch_size",
            ),
            "piece of a prompt ends one token late": (
                "specengine/engine/prefill.py",
                "border = (end - 1) // kept * kept",
                "border = end // kept * kept",
            ),
        },
    ),
    "request": (
        "tests/engine/test_engine.py tests/engine/test_exactness.py tests/engine/test_prefix_hits.py "
        "tests/engine/test_constrained.py",
        {
            "stops one token early": (
                "specengine/engine/request.py",
                "length >= self.limit",
                "length >= self.limit - 1",
            ),
            "tokens after the end are kept": (
                "specengine/engine/request.py",
                "                self.finish(reason)\n                break",
                "                self.finish(reason)",
            ),
            "last prompt token is shared": (
                "specengine/engine/request.py",
                "min(self.cached, self.prompt_length - 1)",
                "self.cached",
            ),
            "forced end of text is ignored": (
                "specengine/engine/request.py",
                "not (params.ignore_eos and params.constraint is None)",
                "not params.ignore_eos",
            ),
            "paths of trees are not compacted": (
                "specengine/engine/cycle.py",
                "not self.drafter.drafts_chains and accepted.path.shape[1] > 1",
                "self.drafter.drafts_chains and accepted.path.shape[1] > 1",
            ),
        },
    ),
    "draft policy": (
        "tests/draft_policy/test_policy.py tests/draft_policy/test_cost_model.py tests/draft_policy/test_widths.py "
        "tests/draft_policy/test_calibration.py tests/draft_policy/test_acceptance.py tests/draft_policy/*.py",
        {
            "levels of a draft cost nothing": (
                "specengine/draft_policy/policy.py",
                "self.further * max(0.0, self.levels - 1)",
                "0 * max(0.0, self.levels - 1)",
            ),
            "price divides by the wrong side": (
                "specengine/draft_policy/policy.py",
                "max(count / curve(0), tokens / seconds)",
                "min(count / curve(0), tokens / seconds)",
            ),
            "measurement counts without a limit": (
                "specengine/draft_policy/cost_model.py",
                "(min(seconds, 2 * usual) - usual)",
                "(seconds - usual)",
            ),
            "point above the rows learns all": (
                "specengine/draft_policy/cost_model.py",
                "((below, 1 - share), (below + 1, share))",
                "((below, share), (below + 1, 1 - share))",
            ),
            "widest of equals": (
                "specengine/draft_policy/widths.py",
                "(seconds[i] / expected[i], i)",
                "(seconds[i] / expected[i], -i)",
            ),
            "calibration of the class below": (
                "specengine/draft_policy/acceptance.py",
                "rates[bisect_right(EDGES, chance)] for",
                "rates[max(0, bisect_right(EDGES, chance) - 1)] for",
            ),
        },
    ),
    "draft trees": (
        "tests/draft_trees/*.py",
        {
            "phrases leave no reserve": (
                "specengine/draft_trees/merge.py",
                "len(self.tokens) + len(phrase) + reserve > MAX_NODES",
                "len(self.tokens) + len(phrase) > MAX_NODES",
            ),
        },
    ),
    "growth": (
        "tests/growth/*.py tests/drafters/test_level_distributions.py tests/drafters/test_eagle.py "
        "tests/drafters/test_block.py",
        {
            "first level forgets where its rows come from": (
                "specengine/ops/growth/growing_trees.py",
                "origin = self._origin if self.level == 0 else None",
                "origin = None",
            ),
            "opened nodes are numbered by their parents": (
                "specengine/ops/growth/growing_trees.py",
                "self._first_node += level.next",
                "self._first_node += level.rows",
            ),
            "levels of one request are those of the batch": (
                "specengine/ops/growth/growing_trees.py",
                "self.values.view(batch, self.levels, -1)[:, level].contiguous()",
                "self.values.view(self.levels, batch, -1)[level].contiguous()",
            ),
            "trees that end early keep the columns of all levels": (
                "specengine/ops/growth/growing_trees.py",
                "if self.first < self.plan.candidates:",
                "if self.first < 0:",
            ),
            "given trees open nodes without children": (
                "specengine/ops/growth/growth_plan.py",
                "if number in children]",
                "if number <= len(children)]",
            ),
            "a whole tree forgets its limits": (
                "specengine/ops/growth/growing_trees.py",
                "limits=self._limits,",
                "limits=None,",
            ),
            "jetspec stops a step early": (
                "specengine/ops/growth/best_first_trees.py",
                "-(-below // self._shape.children)",
                "below // self._shape.children",
            ),
            "given children are those of another request": (
                "specengine/ops/growth/best_first_trees.py",
                "logits.diagonal().copy_(found.scores.T)",
                "logits.diagonal().copy_(found.scores.flip(0).T)",
            ),
            "logits of the deepest level are a distribution too": (
                "specengine/drafters/drawn_trees.py",
                "(depths >= 0) & (depths < limits[:, None])",
                "depths >= 0",
            ),
            "drawn children forget what a head adds": (
                "specengine/drafters/drawn_trees.py",
                "values = values + found.delta",
                "values = values + 0 * found.delta",
            ),
            "sure rows draw more children": (
                "specengine/drafters/drawn_trees.py",
                "(sure[:, None] > thresholds)",
                "(sure[:, None] < thresholds)",
            ),
            "a level is grown that does not pay": (
                "specengine/drafters/growth.py",
                "not min_gain or trees.pays(min_gain)",
                "not min_gain or True",
            ),
            "a node's chance is that of its path": (
                "specengine/drafters/growth.py",
                "exp(score - log[max(0, parent)])",
                "exp(score)",
            ),
            "plans of fewer levels are those of more": (
                "specengine/drafters/network_drafter.py",
                "key = (shape, levels, batch)",
                "key = (shape, batch, batch)",
            ),
            "drawn trees are as deep as the shallowest request": (
                "specengine/drafters/network_drafter.py",
                "min(self.drawn_shape.levels, max(self._limits(requests)))",
                "min(self.drawn_shape.levels, min(self._limits(requests)))",
            ),
            "a network that keeps nothing drafts for no unread request": (
                "specengine/drafters/network_drafter.py",
                "return request.drafter_reads or not self.page_bytes",
                "return request.drafter_reads",
            ),
        },
    ),
    "drafters": (
        "tests/drafters/test_prompt_lookup.py tests/drafters/test_lookahead.py tests/drafters/test_suffix.py "
        "tests/drafters/test_ouroboros.py tests/drafters/test_combine.py tests/drafters/test_draft_model.py "
        "tests/drafters/test_acceptance_watch.py tests/drafters/test_block.py tests/drafters/test_block_heads.py "
        "tests/drafters/test_contract.py tests/engine/test_adapters.py",
        {
            "lookup drafts past the limit": (
                "specengine/drafters/prompt_lookup/drafter.py",
                "deepest = min(config.length, request.draft_limit)",
                "deepest = config.length",
            ),
            "n-gram of the pool is one token off": (
                "specengine/drafters/lookahead/drafter.py",
                "self.pool.insert(tokens[end - ngram], tokens[end - ngram + 1 : end])",
                "self.pool.insert(tokens[end - ngram - 1], tokens[end - ngram + 1 : end])",
            ),
            "window keeps its first level": (
                "specengine/drafters/lookahead/window.py",
                "self.levels = [rest[0][1:], *rest[1:]]",
                "self.levels = [self.levels[0], *rest[1:]]",
            ),
            "suffix memory ignores the adapter": (
                "specengine/drafters/suffix/drafter.py",
                "earlier = self.earlier(request.adapter)\n        if earlier",
                "earlier = self.earlier(None)\n        if earlier",
            ),
            "sentence forgets what is cached ahead": (
                "specengine/drafters/ouroboros/sentences.py",
                "state.ahead = state.sentence[:-1]",
                "state.ahead = state.sentence",
            ),
            "parts of a combination swap their names": (
                "specengine/drafters/combine/drafter.py",
                "(self._names[step.source], step.drafted[i])",
                "(self._names[-1 - step.source], step.drafted[i])",
            ),
            "draft model writes its drafts over the text": (
                "specengine/drafters/draft_model/reader.py",
                "before = np.array([len(request.tokens) - 1 for",
                "before = np.array([len(request.tokens) - 2 for",
            ),
            "draft model keeps a chain's last token, which no pass had": (
                "specengine/drafters/draft_model/drafter.py",
                "drawn.columns[0][:, 1:-1]",
                "drawn.columns[0][:, 1:]",
            ),
            "greedy requests are drafted for as sampled ones": (
                "specengine/drafters/drawn_trees.py",
                "sampling.params.temperature[owners.long()] == 0",
                "sampling.params.temperature[owners.long()] < 0",
            ),
            "watch warns of every drafter": (
                "specengine/drafters/acceptance_watch.py",
                "self._guessed < LEAST * CYCLES",
                "self._guessed <= LEAST + CYCLES",
            ),
            "Markov gate swaps what it reads": (
                "specengine/drafters/block/markov.py",
                "self.ops.linear(beside(slots, change, torch.float32), markov.inner)",
                "self.ops.linear(beside(change, slots, torch.float32), markov.inner)",
            ),
            "convolution reads the slot behind": (
                "specengine/drafters/block/convolution.py",
                "self.kernels[:, tap:, side, tap] * blocks[:, :-tap]",
                "self.kernels[:, :-tap, side, tap] * blocks[:, :-tap]",
            ),
        },
    ),
    "hidden states": (
        "tests/drafters/test_eagle.py tests/drafters/test_glide.py tests/drafters/test_mtp.py",
        {
            "GLIDE's root is not passed again": (
                "specengine/drafters/glide/reader.py",
                "request.drafter_states[self] = len(request.tokens) - 1",
                "request.drafter_states[self] = len(request.tokens)",
            ),
            "GLIDE's drafted rows miss the newest key of the target": (
                "specengine/drafters/glide/rows.py",
                "seen(table, cached - 1)",
                "seen(table, np.maximum(cached - 2, 0))",
            ),
            "pair takes the token before": (
                "specengine/drafters/hidden_states/pairs.py",
                "s.tokens[own.first + 1 : own.first + 1 + own.count]",
                "s.tokens[own.first : own.first + own.count]",
            ),
            "taken pairs are kept": (
                "specengine/drafters/hidden_states/pairs.py",
                "self._hidden_states = [hidden_states[count:]] if self.count else []",
                "self._hidden_states = [hidden_states] if self.count else []",
            ),
        },
    ),
    "tokenizer": (
        "tests/tokenizer/test_stop_strings.py tests/tokenizer/test_detokenizer.py "
        "tests/tokenizer/test_sentencepiece_bpe.py tests/tokenizer/test_tokenizer.py",
        {
            "stop string across pieces": (
                "specengine/tokenizer/stop_strings.py",
                "min(self._longest - 1, len(text))",
                "min(self._longest - 2, len(text))",
            ),
            "first listed stop string wins": (
                "specengine/tokenizer/stop_strings.py",
                "self._matched = min(found)",
                "self._matched = found[0]",
            ),
            "space is stripped from every piece": (
                "specengine/tokenizer/detokenizer.py",
                "self._to_strip - spaces if spaces == len(data) else 0",
                "self._to_strip",
            ),
            "worst merge first": (
                "specengine/tokenizer/sentencepiece_bpe.py",
                "key=lambda merge: merge[:2], reverse=True",
                "key=lambda merge: merge[:2]",
            ),
        },
    ),
    "constraints": (
        "tests/constraints/test_constraint.py tests/constraints/test_grammars.py tests/engine/test_constrained.py",
        {
            "tried token is not taken back": (
                "specengine/constraints/constraint.py",
                "        self._tried.pop()\n        self._matcher.rollback(1)",
                "        self._tried.pop()",
            ),
            "ignored end stays allowed": (
                "specengine/constraints/constraint.py",
                "            row[:] = others\n",
                "            pass\n",
            ),
            "forced text hangs below the root": (
                "specengine/constraints/cut_tree.py",
                "                leaf = len(tokens)\n",
                "",
            ),
            "mask rows of the first request": (
                "specengine/engine/constrained.py",
                "rows[first : first + len(tree.tokens)]",
                "rows[: len(tree.tokens)]",
            ),
        },
    ),
    "checkpoint readers": (
        "tests/models/quantised/test_awq.py tests/models/quantised/test_gptq.py tests/models/quantised/test_fp4.py "
        "tests/models/quantised/test_compressed_tensors.py tests/models/quantised/test_fp8.py "
        "tests/models/test_experts.py tests/models/test_rope.py",
        {
            "AWQ's zeros of the wrong outputs": (
                "specengine/models/quantised/awq.py",
                "[start - 8 * first : stop - 8 * first]",
                "[: stop - start]",
            ),
            "GPTQ's zero is one too low": (
                "specengine/models/quantised/gptq.py",
                "words = words + _ONES[self._bits]",
                "words = words + 0",
            ),
            "NVFP4 multiplies by the divisor": (
                "specengine/models/quantised/fp4.py",
                "scales.float() / self._divisor",
                "scales.float() * self._divisor",
            ),
            "packed zero points start at a word": (
                "specengine/models/quantised/packed_int.py",
                "fields[:, start % 32 :]",
                "fields[:, : stop - start]",
            ),
            "bitsandbytes scales by 128": (
                "specengine/models/quantised/int8.py",
                "(peaks / 127)[:, None]",
                "(peaks / 128)[:, None]",
            ),
            "expert's matrix of the last read": (
                "specengine/models/experts/tensors.py",
                "self._last[0] != key",
                "self._last[0][0] != key[0]",
            ),
            "yarn ramp is not clamped": (
                "specengine/models/rope.py",
                "- low) / (high - low)).clamp(0, 1)",
                "- low) / (high - low))",
            ),
            "dynamic rope takes one position less": (
                "specengine/models/rope.py",
                "torch.arange(1, length + 1, dtype=torch.float32)",
                "torch.arange(0, length, dtype=torch.float32)",
            ),
        },
    ),
    "LoRA folders": (
        "tests/adapters/*.py tests/engine/test_adapters.py",
        {
            "values' rows begin at the keys'": (
                "specengine/models/lora/adapters.py",
                '"self_attn.v_proj": queries + keys}',
                '"self_attn.v_proj": queries}',
            ),
        },
    ),
    "tensor parallel": (
        "tests/tensor_parallel/test_shards.py tests/tensor_parallel/test_same_output.py "
        "tests/tensor_parallel/test_hybrids.py",
        {
            "rows of the rank before": (
                "specengine/tensor_parallel/shards.py",
                "bounds[self._rank : self._rank + 2]",
                "bounds[max(self._rank - 1, 0) : max(self._rank - 1, 0) + 2]",
            ),
            "gate rows are not doubled": (
                "specengine/tensor_parallel/shards.py",
                "tuple(2 * column for column in queries)",
                "tuple(column for column in queries)",
            ),
        },
    ),
    "server": (
        "tests/server/test_limits.py tests/server/test_client.py tests/server/test_token_attribution.py "
        "tests/server/test_chat_requests.py",
        {
            "slot is not given back": (
                "specengine/server/limits.py",
                "            self._running -= 1\n",
                "            pass\n",
            ),
            "body of twice the limit is read": (
                "specengine/server/limits.py",
                "if len(body) > self._settings.max_body_bytes:",
                "if len(body) > 2 * self._settings.max_body_bytes:",
            ),
            "log-probability of the next token": (
                "specengine/server/token_attribution.py",
                "(self._num_decoded, event.logprobs[number])",
                "(self._num_decoded, event.logprobs[-1 - number])",
            ),
            "rest of a token loses its proposer": (
                "specengine/server/token_attribution.py",
                "self._unsent.appendleft((part[len(text) :], self._last_proposer))",
                "pass",
            ),
        },
    ),
    "tool calls": (
        "tests/tool_calls/*.py tests/server/test_tool_calls.py",
        {
            "escaped quote ends a string": (
                "specengine/tool_calls/json_pieces.py",
                "            piece += escaped\n",
                "            piece += escaped\n            quoted = quoted and escaped != '\"'\n",
            ),
            "tag across pieces is content": (
                "specengine/tool_calls/growing_text.py",
                "            held = self._partial_tag(tags, at)\n",
                "            held = 0\n",
            ),
            "number without a fraction is no integer": (
                "specengine/tool_calls/parameter_types.py",
                'names = _names(value) | ({"integer"} if isinstance(value, float) and value.is_integer() else set())',
                "names = _names(value)",
            ),
        },
    ),
    "kept and packed weights": (
        "tests/utils/test_kept_tensors.py tests/utils/test_kept_weights.py tests/train/test_packing.py "
        "tests/drafters/test_suffix.py tests/train/test_command.py",
        {
            "kept tensors outlive their code": (
                "specengine/utils/kept_tensors.py",
                "about = [key, code_that_packs()]",
                "about = [key]",
            ),
            "the core does not name the code": (
                "specengine/utils/kept_weights.py",
                "return [__version__, _C.checksum(content),",
                "return [__version__, content.numel(),",
            ),
            "a file's end is not looked at": (
                "specengine/utils/kept_weights.py",
                "file.seek(max(0, path.stat().st_size - _END_BYTES))",
                "file.seek(0)",
            ),
            "weights that were found are not written again": (
                "specengine/utils/kept_weights.py",
                "        self._used[name] = found\n",
                "",
            ),
            "eight is half a byte": (
                "specengine/models/quantised/packed_weights.py",
                "(matrix.codes < _HALF)",
                "(matrix.codes <= _HALF)",
            ),
            "differences from the first columns": (
                "specengine/models/quantised/packed_weights.py",
                "return base[:, -shape[1] :]",
                "return base[:, : shape[1]]",
            ),
            "unknown tokens have the next row": (
                "specengine/models/draft_files.py",
                "like(base[row[place]] * (known[place] == tokens)[:, None], shape)",
                "like(base[row[place]], shape)",
            ),
            "a base needs no digest": (
                "specengine/models/quantised/packed_weights.py",
                "if source != OWN and source not in sources:",
                "if source is None:",
            ),
            "packed weights of an earlier run come first": (
                "specengine/models/draft_files.py",
                "    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint, MedusaSafetensors, MedusaHeads):\n",
                "    if (folder / FILENAME).is_file():\n        return _unpacked(folder)\n"
                "    for kind in (SafetensorsCheckpoint, TorchBinCheckpoint, MedusaSafetensors, MedusaHeads):\n",
            ),
            "the end of a packed text is a token": (
                "specengine/drafters/suffix/corpus_file.py",
                "torch.where(wide == _NARROW_END, _END, wide)",
                "wide",
            ),
        },
    ),
}
