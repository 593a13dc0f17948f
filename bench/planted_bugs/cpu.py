"""Bugs of the core on the CPU: room -> (test files that are run first, {name: (file, text, text in its place)})."""

BUGS = {
    "verify rules": (
        "tests/ops/test_verify_tree.py tests/ops/test_verify_masks.py tests/rules/test_rules.py "
        "tests/ops/test_verify_law.py tests/rules/test_rule_law.py",
        {
            "child of an earlier node": (
                "csrc/rules/drafted_tree.h",
                "parents[child] == node && is_allowed",
                "parents[child] <= node && is_allowed",
            ),
            "refusal keeps the target": ("csrc/rules/rejection.h", "rows.reject(child, scale);", "(void)scale;"),
            "typical takes the larger limit": (
                "csrc/rules/typical.h",
                "limit < epsilon ? limit : epsilon",
                "limit < epsilon ? epsilon : limit",
            ),
            "traversal adds the chance": (
                "csrc/rules/traversal.h",
                "mass / (mass + (1 - chance))",
                "mass / (mass + chance)",
            ),
            "cascade defers with a swapped sign": (
                "csrc/rules/cascade.h",
                "draft_top >= target_top - alpha",
                "draft_top >= target_top + alpha",
            ),
            "margin prefers the second": (
                "csrc/rules/margin.h",
                "i == 0 ? best.token : second.token",
                "i == 0 ? second.token : best.token",
            ),
            "sibling is not taken out of the draft": (
                "csrc/rules/rows.h",
                "if (!logits_.replacement) {",
                "if (logits_.replacement) {",
            ),
            "draft is masked by the root's row": (
                "csrc/rules/rows.h",
                "mask_draft(masks.row(node), needs)",
                "mask_draft(masks.row(0), needs)",
            ),
            "masks of the first request": ("csrc/cpu/**/verify_tree.cpp", "op.masks_of(first)", "op.masks_of(0)"),
        },
    ),
    "sampling filters": (
        "tests/ops/test_verify_tree.py tests/ops/test_noise.py tests/ops/test_draw_siblings.py",
        {
            "draw forgets the depth": (
                "csrc/cpu/**/thread_sampler.h",
                "root_position() + 1 + static_cast<uint32_t>(depth_)",
                "root_position() + 1",
            ),
            "sibling draws share a salt": (
                "csrc/rules/siblings.h",
                "static_cast<uint32_t>(node) << 16 | static_cast<uint32_t>(i)",
                "static_cast<uint32_t>(i)",
            ),
            "presence penalty of the prompt": (
                "csrc/base/draw_arithmetic.h",
                "(outputs > 0 ? presence : 0.0f)",
                "presence",
            ),
            "tie keeps the higher tokens": (
                "csrc/cpu/**/thread_sampler.h",
                "if (key == threshold && above < target)",
                "if (key == threshold && above <= target)",
            ),
            "outputs count as prompt": (
                "csrc/cpu/**/thread_sampler.h",
                "count = i < prompt ? kSeen : count + 1;",
                "count = i < length ? kSeen : count + 1;",
            ),
        },
    ),
    "attention": (
        "tests/ops/test_tree_attention.py tests/ops/test_causal_attention.py",
        {
            "window is one short": (
                "csrc/cpu/**/tree_attention.cpp",
                "last_[row] - op.window + 1)",
                "last_[row] - op.window + 2)",
            ),
            "page border of the prefix": (
                "csrc/cpu/**/tree_attention.cpp",
                "chain_ ? slots_ : length_ / kBlockSize * kBlockSize;",
                "chain_ ? slots_ : (length_ + 2) / kBlockSize * kBlockSize;",
            ),
            "sink is no part of the sum": (
                "csrc/cpu/**/tree_attention.cpp",
                "total_[p] = sinks ? 1.0f : 0.0f;",
                "total_[p] = 0.0f;",
            ),
        },
    ),
    "kv compaction": (
        "tests/ops/test_compact_kv.py",
        {
            "step counts from the wrong slot": (
                "csrc/cpu/**/compact_kv.cpp",
                "from = row(length + path[j])",
                "from = row(length + path[j] - 1)",
            ),
            "only keys move": (
                "csrc/cpu/**/compact_kv.cpp",
                "{&op.k_cache, &op.v_cache}",
                "{&op.k_cache, &op.k_cache}",
            ),
        },
    ),
    "layer": (
        "tests/ops/test_layer.py tests/ops/test_decoder.py tests/models/test_transformer.py",
        {
            "rotation turns backwards": (
                "csrc/cpu/**/layer.cpp",
                "store1(out + i, a * cos[i] - b * sin[i]);",
                "store1(out + i, a * cos[i] + b * sin[i]);",
            ),
            "cache slot ignores the first node": (
                "csrc/cpu/**/layer.cpp",
                "slot = length + op.cache.first_node + m - row_start[b]",
                "slot = length + m - row_start[b]",
            ),
            "head norm squares one dimension less": (
                "csrc/cpu/**/layer.cpp",
                "whole_ || !weight_ ? scale_ : inverse_rms(head, dim_, eps_)",
                "whole_ || !weight_ ? scale_ : inverse_rms(head, dim_ - 1, eps_)",
            ),
            "clamp of one side is missing": (
                "csrc/cpu/**/layer.cpp",
                "    up = up < -limit ? -limit : up;\n",
                "",
            ),
            "code sum is that of the last vector": (
                "csrc/cpu/**/layer.cpp",
                "total += codes[i];",
                "total = codes[i];",
            ),
        },
    ),
    "decoder": (
        "tests/ops/test_decoder.py tests/models/test_transformer.py tests/models/test_granite.py "
        "tests/models/test_hybrids.py",
        {
            "last hidden state lacks the multiplier": (
                "csrc/cpu/**/decoder.cpp",
                "return factor * x;",
                "return x;",
            ),
            "residual is scaled twice": (
                "csrc/cpu/**/decoder.cpp",
                "d.multipliers.embedding / d.multipliers.residual",
                "d.multipliers.embedding",
            ),
            "layer of the cache counts all layers": (
                "csrc/cpu/**/decoder.cpp",
                "op.cache.layer(static_cast<int64_t>(i) - state_layers)",
                "op.cache.layer(static_cast<int64_t>(i))",
            ),
        },
    ),
    "LoRA": (
        "tests/ops/test_lora.py tests/adapters/test_peft.py",
        {
            "scale of the first adapter": (
                "csrc/cpu/**/add_lora.cpp",
                "module.scales.as<float>()[adapter]",
                "module.scales.as<float>()[0]",
            ),
        },
    ),
    "linear formats": (
        "tests/ops/test_weight.py tests/ops/test_linear.py tests/models/test_gguf_codes.py tests/models/test_gguf.py",
        {
            "Q4_K takes the scale's high bits elsewhere": (
                "csrc/cpu/**/file_blocks.h",
                "small[i - 4] >> 6 << 4",
                "small[i] >> 6 << 4",
            ),
            "Q4_K minimum has the wrong sign": (
                "csrc/cpu/**/pack_weight.cpp",
                "-dmin * static_cast<float>(m)",
                "dmin * static_cast<float>(m)",
            ),
            "zero point is not made signed": (
                "csrc/cpu/**/pack_weight.cpp",
                "op.zeros.as<uint8_t>()[from] - shift",
                "op.zeros.as<uint8_t>()[from]",
            ),
        },
    ),
    "experts": (
        "tests/ops/test_experts.py tests/models/test_experts.py",
        {
            "router adds the first bias": (
                "csrc/cpu/**/experts.cpp",
                "op.bias.as<float>()[e]",
                "op.bias.as<float>()[0]",
            ),
            "ties go to the later expert": (
                "csrc/cpu/**/experts.cpp",
                "logits[e] > logits[best]",
                "logits[e] >= logits[best]",
            ),
        },
    ),
    "gated delta": (
        "tests/ops/test_gated_delta.py tests/models/test_hybrids.py",
        {
            "tiled heads read the wrong key": (
                "csrc/cpu/**/compact_states.cpp",
                "op.tiled ? head % op.key_heads : head / (Hv / op.key_heads)",
                "head / (Hv / op.key_heads)",
            ),
            "kept inputs are one token old": (
                "csrc/cpu/**/compact_states.cpp",
                "first_row + path[from]);",
                "first_row + path[std::max<int64_t>(from - 1, 0)]);",
            ),
            "decay and rate are swapped": (
                "csrc/cpu/**/compact_states.cpp",
                "gates[head], gates[Hv + head]}",
                "gates[Hv + head], gates[head]}",
            ),
        },
    ),
    "tree growth": (
        "tests/ops/test_expand_backbone.py tests/ops/test_select_nodes.py tests/draft_trees/*.py tests/growth/*.py",
        {
            "backbone score leaves out its parent": (
                "csrc/growth/backbone.h",
                "above[level] + children.log_prob(level, rank)",
                "children.log_prob(level, rank)",
            ),
            "ranks of the level below": (
                "csrc/growth/ranks.h",
                "clamp(depths[node - 1] - 1, levels - 1)",
                "clamp(depths[node - 1], levels - 1)",
            ),
            "ties of a ddtree go to the earlier node": (
                "csrc/growth/best_first.h",
                "kind == BestFirstKind::kDdtree ? has_lower_ranks(node, other) : node < other",
                "node < other",
            ),
            "opened node competes again": (
                "csrc/growth/best_first.h",
                "next[node] = children.count;\n      return node;",
                "return node;",
            ),
            "top2gap rounds halves up": (
                "csrc/growth/best_first.h",
                "std::rint(count * share)",
                "std::floor(count * share + 0.5)",
            ),
            "deepest level is opened": (
                "csrc/growth/best_first.h",
                "nodes.depths[child] < levels ? child : -1",
                "nodes.depths[child] <= levels ? child : -1",
            ),
            "of equals the later node is opened": (
                "csrc/growth/best_first.h",
                "has_lower_ranks(node, other) : node < other",
                "has_lower_ranks(node, other) : node > other",
            ),
            "path's memory is that of another step": (
                "csrc/growth/path_growth.h",
                "static_cast<int64_t>(steps[tree.nodes.parents[node]]) * batch",
                "static_cast<int64_t>(tree.nodes.parents[node]) * batch",
            ),
            "of equals the later entry is opened": (
                "csrc/growth/select.h",
                "key_j == key_i && j < i",
                "key_j == key_i && j > i",
            ),
            "classes count the thresholds above": (
                "csrc/growth/shapes.h",
                "expf(first) > thresholds[own]",
                "expf(first) < thresholds[own]",
            ),
            "first child keeps its own chance": (
                "csrc/growth/confident_score.h",
                "child == 0 ? chance : expf(own) * rest",
                "child == 0 ? expf(own) : expf(own) * rest",
            ),
            "child of an absent node exists": (
                "csrc/growth/tree.h",
                "!known || token < 0 || parent_depth < 0 ? -1",
                "!known || token < 0 ? -1",
            ),
            "row forgets its ancestors": (
                "csrc/growth/tree.h",
                "op.above_bits[before * op.words + w] | own : 0u",
                "own : 0u",
            ),
            "absent row on the CPU has no token": (
                "csrc/growth/tree.h",
                "exists ? child.token : op.fills ? 0 : -1",
                "exists ? child.token : -1",
            ),
            "limit leaves the deepest level out": (
                "csrc/cpu/**/select_nodes.cpp",
                "exists(i) && depths[i] <= limit",
                "exists(i) && depths[i] < limit",
            ),
            "beam goes on from the wrong rows": (
                "csrc/growth/tree.h",
                "op.origin == nullptr ? before : op",
                "op.origin == nullptr ? row : op",
            ),
            "chance of the wrong candidate": (
                "csrc/growth/grow.cpp",
                "* k_ + candidate - 1 - before * k_];",
                "* k_ + candidate - before * k_];",
            ),
            "joined trees keep the lower chance": (
                "csrc/drafting/scored_tree.cpp",
                "std::max(own, other)",
                "std::min(own, other)",
            ),
            "cut ignores the cost": (
                "csrc/drafting/scored_tree.cpp",
                "expected - costs[count]",
                "expected - costs[0]",
            ),
        },
    ),
    "pools": (
        "tests/pools/*.py tests/drafters/test_suffix.py tests/drafters/test_prompt_lookup.py",
        {
            "n-gram ends one token late": (
                "csrc/drafting/ngram_index.cpp",
                "const int32_t token = text_[end];",
                "const int32_t token = text_[end - 1];",
            ),
            "n-gram forgets earlier ends": (
                "csrc/drafting/ngram_index.cpp",
                "length.earlier.push_back(newest);",
                "length.earlier.push_back(0);",
            ),
            "clone forgets the count": (
                "csrc/drafting/suffix_automaton.cpp",
                "states_[clone].count = states_[child].count;",
                "states_[clone].count = 0;",
            ),
            "cut keeps the counted state": (
                "csrc/drafting/suffix_automaton.cpp",
                "counted_ = {kRoot, 0};",
                "",
            ),
            "pool drops the newest phrase": (
                "csrc/drafting/phrase_pool.cpp",
                "    erase(entry, 0);",
                "    erase(entry, width_ - 1);",
            ),
            "range of a corpus lacks its last place": (
                "csrc/drafting/text_corpus.cpp",
                "compared(place) <= 0; });",
                "compared(place) < 0; });",
            ),
        },
    ),
    "trained drafters": (
        "tests/growth/test_networks.py "
        "tests/drafters/test_medusa.py tests/drafters/test_fasteagle.py tests/drafters/test_eagle.py",
        {
            "heads share one request's rows": (
                "csrc/networks/heads.cpp",
                "rows_of(x_, t * B, B)",
                "rows_of(x_, t, B)",
            ),
            "states are read from the wrong row": (
                "csrc/networks/fasteagle.cpp",
                "take_rows(in_.hidden_states, in_.rows.as",
                "take_rows(in_.hidden_states, in_.depths.as",
            ),
            "level tokens of the wrong request": (
                "csrc/networks/fasteagle.cpp",
                "in_.last.as<int32_t>()[i % B] * layers + i / B",
                "in_.last.as<int32_t>()[i / levels_] * layers + i % levels_",
            ),
            "drafter's length counts the root": (
                "csrc/networks/eagle.cpp",
                "in_.ends.as<int32_t>()[b] - 1",
                "in_.ends.as<int32_t>()[b]",
            ),
        },
    ),
    "base": (
        "tests/ops/test_noise.py tests/ops/test_thread_pool.py",
        {
            "random bits of the wrong word": (
                "csrc/base/philox.h",
                "return index & 2 ? high : low;",
                "return index & 2 ? low : high;",
            ),
        },
    ),
}
