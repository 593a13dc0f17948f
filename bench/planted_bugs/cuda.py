"""Bugs of the CUDA kernels: room -> (test files that are run first, {name: (file, text, text in its place)})."""

BUGS = {
    "kv compaction (CUDA)": (
        "tests/ops/test_compact_kv.py",
        {
            "last slot of a page": (
                "csrc/cuda/**/compact_kv.cu",
                "page * page_vectors + slot % kPageSize * columns;",
                "page * page_vectors + slot % (kPageSize - 1) * columns;",
            ),
            "first step of a warp stays": (
                "csrc/cuda/**/compact_kv.cu",
                "moving >> (s + j) & 1) != 0) rows[j]",
                "moving >> (s + j) & 1) != 0 && s > 0) rows[j]",
            ),
        },
    ),
    "attention (CUDA)": (
        "tests/ops/test_tree_attention_cuda.py tests/ops/test_layer_cuda.py",
        {
            "splits merge without the last weight": (
                "csrc/cuda/**/merge_splits.cuh",
                "begin + s >= range.end) continue;",
                "begin + s + 1 >= range.end) continue;",
            ),
            "merge starts before the maxima": (
                "csrc/cuda/**/merge_splits.cuh",
                "    highest[own] = best;\n  }\n  __syncthreads();",
                "    highest[own] = best;\n  }",
            ),
            "window starts one split late": (
                "csrc/cuda/**/merge_splits.cuh",
                "{split_of(max(0, last - a.window + 1)), split_of(last) + 1}",
                "{split_of(max(0, last - a.window + 1)) + (last > a.window), split_of(last) + 1}",
            ),
            "value heads start one early": (
                "csrc/cuda/**/rope_head.cuh",
                "is_value = head >= op.heads + op.kv_heads;",
                "is_value = head > op.heads + op.kv_heads;",
            ),
            "rope reads the slot as position": (
                "csrc/cuda/**/rope_head.cuh",
                "static_cast<int64_t>(length + depth) * op.rotated",
                "static_cast<int64_t>(length + row) * op.rotated",
            ),
        },
    ),
    "base (CUDA)": (
        "tests/ops/test_expand_backbone.py tests/ops/test_tree_attention_cuda.py tests/simulator/test_simulator.py",
        {
            "block arrives without a fence": (
                "csrc/cuda/**/last_block.cuh",
                "    __threadfence();\n    last[0] =",
                "    last[0] =",
            ),
            "scratch is free too early": (
                "csrc/cuda/**/reduce.cuh",
                "  __syncthreads();  // the caller may use scratch for the next one\n",
                "",
            ),
        },
    ),
    "linear and norms (CUDA)": (
        "tests/ops/test_layer_cuda.py tests/ops/test_fused_cuda.py tests/ops/test_row_inputs.py",
        {
            "norm starts before the row is written": (
                "csrc/cuda/**/gather_rows.cu",
                "  __syncthreads();\n  norm_rows",
                "  norm_rows",
            ),
            "clamp of the gate is missing": (
                "csrc/cuda/**/silu_mul.cu",
                "    gate = gate > limit ? limit : gate;\n",
                "",
            ),
            "joined row takes the wrong parent": (
                "csrc/cuda/**/row_inputs.cu",
                "op.above == nullptr ? m : op.above[m]",
                "op.above == nullptr ? m : m",
            ),
            "fused rope counts one block less": (
                "csrc/cuda/**/fused_linear.cu",
                "rope.dim / block_rows)) return;",
                "rope.dim / block_rows - 1)) return;",
            ),
        },
    ),
    "coded formats (CUDA)": (
        "tests/ops/test_coded_linear_cuda.py",
        {
            "gathered row uses the first row's scale": (
                "csrc/cuda/**/coded_linear.cu",
                "load_groups<kKind, kValue>(group, chunk, form, row, in_chunk)",
                "load_groups<kKind, kValue>(group, chunk, form, row, 0)",
            ),
            "bias of a part starts at zero": (
                "csrc/cuda/**/coded_linear.cu",
                "op.bias.as<float>() + op.first : nullptr",
                "op.bias.as<float>() : nullptr",
            ),
        },
    ),
    "LoRA (CUDA)": (
        "tests/ops/test_lora.py",
        {
            "ranks are summed before the barrier": (
                "csrc/cuda/**/lora.cu",
                "  parts[threadIdx.x] = sum;\n  __syncthreads();",
                "  parts[threadIdx.x] = sum;",
            ),
            "first row takes the adapter before": (
                "csrc/cuda/**/lora.cu",
                "before += requests.row_start[b + 1] <= row;",
                "before += requests.row_start[b + 1] < row;",
            ),
        },
    ),
    "experts (CUDA)": (
        "tests/ops/test_experts_cuda.py",
        {
            "shared expert is not scaled": (
                "csrc/cuda/**/combine_experts.cu",
                "op.shared_scale == nullptr ? 1.0f : op.shared_scale[row]",
                "1.0f",
            ),
            "place counts the own lane": (
                "csrc/cuda/**/group_pairs.cu",
                "all & ((1u << lane) - 1)",
                "all & ((2u << lane) - 1)",
            ),
            "router adds the first bias (CUDA)": (
                "csrc/cuda/**/route_rows.cu",
                "bias == nullptr ? 0.0f : bias[expert]",
                "bias == nullptr ? 0.0f : bias[0]",
            ),
        },
    ),
    "gated delta (CUDA)": (
        "tests/ops/test_gated_delta_cuda.py",
        {
            "gate of the wrong head": (
                "csrc/cuda/**/gate_heads.cu",
                "(head + 1) * dim + i];",
                "head * dim + i];",
            ),
            "next token is not there yet": (
                "csrc/cuda/**/compact_states.cu",
                "[](int, float, int) { __syncthreads(); }",
                "[](int, float, int) {}",
            ),
            "convolution keeps one input too old": (
                "csrc/cuda/**/delta_step.cuh",
                "const int from = i + count - kKept;",
                "const int from = i + count - kKept - (count > 1);",
            ),
            "ancestor of the next word is lost": (
                "csrc/cuda/**/gated_delta.cu",
                "while (above == 0 && word + 1 < words) above = bits[++word];",
                "while (above == 0 && word + 2 < words) above = bits[++word];",
            ),
        },
    ),
    "sampling (CUDA)": (
        "tests/ops/test_verify_tree_cuda.py tests/ops/test_draw_siblings.py tests/ops/test_verify_masks.py "
        "tests/ops/test_verify_rules_cuda.py",
        {
            "draw is keyed by the root's position": (
                "csrc/cuda/**/tree_rows.cuh",
                "op.table.history_length[b] + row.depth)",
                "op.table.history_length[b])",
            ),
            "mask of the wrong node": (
                "csrc/cuda/**/verify_tree.cu",
                "row.mask = masks.row(blockIdx.x)",
                "row.mask = masks.row(blockIdx.x - row.depth)",
            ),
            "path is read before it is written": (
                "csrc/cuda/**/block_sampler.cuh",
                "    __syncthreads();\n  }\n\n  row.keep_all(), row.temperature = 0;",
                "  }\n\n  row.keep_all(), row.temperature = 0;",
            ),
            "slices after the first are not merged": (
                "csrc/cuda/**/verify_tree.cu",
                "for (int i = 0; i < slices; ++i) best",
                "for (int i = 0; i < min(slices, 1); ++i) best",
            ),
        },
    ),
    "walks (CUDA)": (
        "tests/ops/test_noted_walks_cuda.py tests/ops/test_verify_rules_cuda.py",
        {
            "notes of the last part are not summed": (
                "csrc/cuda/**/walk_notes.cu",
                "part < op.note_parts; ++part",
                "part < max(1, op.note_parts - 1); ++part",
            ),
            "lowered child keeps its weight": (
                "csrc/cuda/**/node_state.cuh",
                "      if (change.sets) target = change.weight;\n",
                "",
            ),
        },
    ),
    "trees (CUDA)": (
        "tests/ops/test_select_nodes.py tests/ops/test_expand_backbone.py tests/growth/*.py "
        "tests/ops/test_add_copies.py tests/ops/test_gru_step.py",
        {
            "words before count themselves": (
                "csrc/cuda/**/select_nodes.cu",
                "for (int word = 0; word < t; ++word)",
                "for (int word = 0; word <= t; ++word)",
            ),
            "nodes are numbered before they are known": (
                "csrc/cuda/**/select_nodes.cu",
                "  node_of[t] = node;\n  __syncthreads();",
                "  node_of[t] = node;",
            ),
            "unsound level is a level": (
                "csrc/cuda/**/expand_levels.cu",
                "unsound = __syncthreads_or(unsound);",
                "__syncthreads();",
            ),
            "lanes keep their own best entry": (
                "csrc/cuda/**/best_first.cuh",
                "if (other >= 0) meet(other);",
                "if (other >= 0 && best < 0) meet(other);",
            ),
            "child of the wrong row": (
                "csrc/cuda/**/grow_level.cu",
                "static_cast<int64_t>(b) * op.width + row;",
                "static_cast<int64_t>(b) * op.width;",
            ),
            "tree goes on in the columns of another request": (
                "csrc/ops/**/expand_node.h",
                "all.tree.next += from",
                "all.tree.next += b",
            ),
            "copied chain forgets its start": (
                "csrc/cuda/**/add_copies.cu",
                "node == agreed ? last : i - 1",
                "node == agreed ? 0 : i - 1",
            ),
            "gates of the GRU are swapped": (
                "csrc/cuda/**/gru_step.cu",
                "(1.0f - update) * fresh + update * before",
                "update * fresh + (1.0f - update) * before",
            ),
        },
    ),
    "texts (CUDA)": (
        "tests/ops/test_commit_tokens.py tests/ops/test_draft_lookup.py tests/ops/test_text_rows.py "
        "tests/ops/test_pairs.py",
        {
            "text ends one token early": (
                "csrc/cuda/**/commit_tokens.cu",
                "length + i + 1 >= p.final_length[b]",
                "length + i >= p.final_length[b]",
            ),
            "ended request stays active": (
                "csrc/cuda/**/commit_tokens.cu",
                "p.active[b] = !ended;",
                "p.active[b] = 1;",
            ),
            "shortest match is left out": (
                "csrc/cuda/**/longest_match.cuh",
                "if (match >= min_ngram) best",
                "if (match > min_ngram) best",
            ),
            "first is changed while it is read": (
                "csrc/cuda/**/text_rows.cu",
                "  __syncthreads();  // all threads have read `first`\n",
                "",
            ),
            "masks read a pair's hidden state": (
                "csrc/cuda/**/pairs.cu",
                "masked ? static_cast<int>(gridDim.x) * states : b * states",
                "masked ? b * states : b * states",
            ),
            "kept pairs overrun the room": (
                "csrc/cuda/**/pairs.cu",
                "min(op.nodes, op.room - before)",
                "min(op.nodes, op.room)",
            ),
        },
    ),
    "tensor parallel (CUDA)": (
        "tests/tensor_parallel/test_devices.py",
        {
            "every rank adds the bias": (
                "specengine/tensor_parallel/shards.py",
                "biased = self._rank == 0 and f",
                "biased = f",
            ),
        },
    ),
}
