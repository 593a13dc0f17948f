// The op table: every op on one page, grouped by stage of the cycle.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "base/tensor_caster.h"
#include "base/thread_pool.h"
#include "ops/commit_tokens.h"
#include "ops/compact_kv.h"
#include "ops/decoder.h"
#include "ops/draft_backbone.h"
#include "ops/draft_lookup.h"
#include "ops/draw_siblings.h"
#include "ops/expand_backbone.h"
#include "ops/launch_mode.h"
#include "ops/layer.h"
#include "ops/linear.h"
#include "ops/select_nodes.h"
#include "ops/tree_attention.h"
#include "ops/verify_tree.h"
#include "pools/bindings.h"
#if defined(SPECENGINE_SIM)
#include "sim/module.h"
#endif

namespace py = pybind11;
using namespace specengine;
using T = TensorView;

namespace {

// The one place that chooses a backend: the CUDA kernels are all that the simulator's module has.
template <typename Op>
bool runs_on_cuda(const Op& op) {
#if defined(SPECENGINE_SIM)
  sim::begin_op();
#endif
  return for_cuda(op.validate());
}

[[noreturn]] void fail_without_kernel(const char* name, const char* backend) {
  throw std::runtime_error(std::string(name) + ": no " + backend + " kernel in this build");
}

template <typename Op>
void run_op(const char* name, const Op& op) {
  if (!runs_on_cuda(op)) {
    if constexpr (requires { run_cpu(op); }) return run_cpu(op);
    fail_without_kernel(name, "CPU");
  }
#if defined(SPECENGINE_HAVE_CUDA)
  if constexpr (requires { run_cuda(op); }) return run_cuda(op);
#endif
  fail_without_kernel(name, "CUDA");
}

// Floats of workspace that an op needs for its arguments: none on the CPU.
template <typename Op>
int64_t workspace_of(const char* name, const Op& op) {
  if (!runs_on_cuda(op)) return 0;
#if defined(SPECENGINE_HAVE_CUDA)
  if constexpr (requires { workspace_floats(op); }) return workspace_floats(op);
#endif
  fail_without_kernel(name, "CUDA");
}

// A struct of tensors crosses as a tuple of its members, which keeps their memory alive.
template <size_t count>
using Columns = std::array<T, count>;

SampledTrees trees_of(const T& tokens, const T& parents, const T& row_start, const Columns<11>& sampling,
                      const Columns<3>& history) {
  const auto table = [](const auto&... column) { return SamplingTable{column...}; };
  const auto texts = [](const auto&... column) { return TokenHistory{column...}; };
  return {tokens, parents, row_start, std::apply(table, sampling), std::apply(texts, history)};
}

const char* cuda_architectures() {
#if defined(SPECENGINE_HAVE_CUDA)
  return SPECENGINE_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}

py::tuple instruction_sets() {  // of this build, as far as this machine has them
  py::list names;
  for (Isa isa : kIsas) {
    if (runs_here(isa)) names.append(name_of(isa));
  }
  return py::tuple(names);
}

py::tuple linear_variants() {  // (rows, warps) of a block, from variant 1 on
  py::list variants;
  for (const LinearVariant& variant : kLinearVariants) variants.append(py::make_tuple(variant.rows, variant.warps));
  return py::tuple(variants);
}

}  // namespace

PYBIND11_MODULE(SPECENGINE_MODULE, m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  const release_gil nogil;

  // weights
  m.def(
      "pack_linear", [](T rows, T packed, int64_t first) { run_op("pack_linear", PackLinear{rows, packed, first}); },
      nogil, py::arg("rows"), py::arg("packed"), py::arg("first"));
  m.def(
      "pack_blocks",
      [](T rows, T packed, int64_t first, const std::string& type) {
        run_op("pack_blocks", PackBlocks{rows, packed, first, type});
      },
      nogil, py::arg("rows"), py::arg("packed"), py::arg("first"), py::arg("type"));

  // target forward
  m.def(
      "gather_rows", [](T weight, T ids, T out) { run_op("gather_rows", GatherRows{weight, ids, out}); }, nogil,
      py::arg("weight"), py::arg("ids"), py::arg("out"));
  m.def(
      "quantise_rows", [](T x, T out) { run_op("quantise_rows", QuantiseRows{x, out}); }, nogil, py::arg("x"),
      py::arg("out"));
  m.def(
      "linear",
      [](T x, T weight, T bias, T out, int64_t first, int64_t rows, int64_t variant) {
        run_op("linear", Linear{x, weight, bias, out, first, rows, variant});
      },
      nogil, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("out"), py::arg("first"), py::arg("rows"),
      py::arg("variant") = 0);
  m.def(
      "linear_argmax",
      [](T x, T weight, T bias, T ids, T keys, int64_t rows, int64_t variant) {
        run_op("linear_argmax", LinearArgmax{x, weight, bias, ids, keys, rows, variant});
      },
      nogil, py::arg("x"), py::arg("weight"), py::arg("bias"), py::arg("ids"), py::arg("keys"), py::arg("rows"),
      py::arg("variant") = 0);
  m.def(
      "rms_norm",
      [](T residual, T delta, T weight, T out, float eps) {
        run_op("rms_norm", RmsNorm{residual, delta, weight, out, eps});
      },
      nogil, py::arg("residual"), py::arg("delta"), py::arg("weight"), py::arg("out"), py::arg("eps"));
  m.def(
      "silu_mul", [](T gate_up, T out) { run_op("silu_mul", SiluMul{gate_up, out}); }, nogil, py::arg("gate_up"),
      py::arg("out"));
  m.def(
      "rope_cache",
      [](T qkv, T cos, T sin, T q_norm, T k_norm, T depths, T k_cache, T v_cache, T block_table, T lengths, T row_start,
         T q, float eps, int64_t first_node) {
        run_op("rope_cache", RopeCache{qkv,
                                       cos,
                                       sin,
                                       q_norm,
                                       k_norm,
                                       depths,
                                       {k_cache, v_cache, block_table, lengths, row_start, first_node},
                                       q,
                                       eps});
      },
      nogil, py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("q_norm"), py::arg("k_norm"), py::arg("depths"),
      py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("lengths"), py::arg("row_start"),
      py::arg("q"), py::arg("eps"), py::arg("first_node") = 0);
  m.def(
      "tree_attention",
      [](T q, T k_cache, T v_cache, T block_table, T lengths, T row_start, T ancestors, T out, float scale,
         int64_t window, bool strict, T workspace, int64_t first_node) {
        run_op("tree_attention", TreeAttention{q,
                                               {k_cache, v_cache, block_table, lengths, row_start, first_node},
                                               ancestors,
                                               out,
                                               scale,
                                               window,
                                               strict,
                                               workspace});
      },
      nogil, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("lengths"),
      py::arg("row_start"), py::arg("ancestors"), py::arg("out"), py::arg("scale"), py::arg("window"),
      py::arg("strict"), py::arg("workspace"), py::arg("first_node") = 0);
  m.def(
      "tree_attention_workspace",
      [](T q, T k_cache, T v_cache, T block_table, T lengths, T row_start, T ancestors, T out, float scale,
         int64_t window, bool strict) {
        return workspace_of(
            "tree_attention",
            TreeAttention{
                q, {k_cache, v_cache, block_table, lengths, row_start}, ancestors, out, scale, window, strict, T()});
      },
      nogil, py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("lengths"),
      py::arg("row_start"), py::arg("ancestors"), py::arg("out"), py::arg("scale"), py::arg("window"),
      py::arg("strict"));

  py::class_<Projection>(m, "Projection", py::module_local())
      .def(py::init([](const std::vector<T>& weights, const std::vector<int64_t>& rows, T bias) {
             return Projection{weights, rows, bias};
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::arg("weights"), py::arg("rows"), py::arg("bias"));
  py::class_<DecoderLayer>(m, "DecoderLayer", py::module_local())
      .def(py::init([](T attention_norm, const Projection& qkv, T q_norm, T k_norm, const Projection& attention_out,
                       T mlp_norm, const Projection& gate_up, const Projection& down, int64_t window) {
             return DecoderLayer{attention_norm, qkv, q_norm, k_norm, attention_out, mlp_norm, gate_up, down, window};
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 6>(), py::keep_alive<1, 7>(), py::keep_alive<1, 8>(), py::keep_alive<1, 9>(),
           py::arg("attention_norm"), py::arg("qkv"), py::arg("q_norm"), py::arg("k_norm"), py::arg("attention_out"),
           py::arg("mlp_norm"), py::arg("gate_up"), py::arg("down"), py::arg("window"));
  py::class_<Decoder>(m, "Decoder", py::module_local())
      .def(py::init([](T embedding, const std::vector<DecoderLayer>& layers, T final_norm, int64_t hidden,
                       int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t intermediate, float eps,
                       int64_t first_columns, const std::vector<int64_t>& hidden_state_layers) {
             Decoder decoder{embedding, layers,        final_norm,         hidden,
                             heads,     kv_heads,      head_dim,           intermediate,
                             eps,       first_columns, hidden_state_layers};
             decoder.validate();
             return decoder;
           }),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::arg("embedding"),
           py::arg("layers"), py::arg("final_norm"), py::arg("hidden"), py::arg("heads"), py::arg("kv_heads"),
           py::arg("head_dim"), py::arg("intermediate"), py::arg("eps"), py::arg("first_columns"),
           py::arg("hidden_state_layers"))
      .def("workspace_bytes", &Decoder::workspace_bytes, py::arg("rows"));
  m.def(
      "decoder_pass",
      [](const Decoder& decoder, T tokens, T inputs, T first_inputs, T depths, T ancestors, T k_cache, T v_cache,
         T block_table, T lengths, T row_start, T cos, T sin, T hidden_states, T at_layers, T workspace,
         int64_t first_node) {
        run_op("decoder_pass",
               DecoderPass{decoder, tokens, inputs, first_inputs, depths, ancestors, k_cache, v_cache, block_table,
                           lengths, row_start, cos, sin, hidden_states, at_layers, workspace, first_node});
      },
      nogil, py::arg("decoder"), py::arg("tokens"), py::arg("inputs"), py::arg("first_inputs"), py::arg("depths"),
      py::arg("ancestors"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("lengths"),
      py::arg("row_start"), py::arg("cos"), py::arg("sin"), py::arg("hidden_states"), py::arg("at_layers"),
      py::arg("workspace"), py::arg("first_node") = 0);

  // draft
  m.def(
      "expand_backbone",
      [](T logits, T root, T thresholds, T widths, T tokens, T parents, T depths, T scores, T ancestors, T node_counts,
         T top_tokens, T top_scores, T sums, T arrived) {
        run_op("expand_backbone", ExpandBackbone{logits, root, thresholds, widths, tokens, parents, depths, scores,
                                                 ancestors, node_counts, top_tokens, top_scores, sums, arrived});
      },
      nogil, py::arg("logits"), py::arg("root"), py::arg("thresholds"), py::arg("widths"), py::arg("tokens"),
      py::arg("parents"), py::arg("depths"), py::arg("scores"), py::arg("ancestors"), py::arg("node_counts"),
      py::arg("top_tokens"), py::arg("top_scores"), py::arg("sums"), py::arg("arrived"));
  m.def(
      "draft_backbone",
      [](const Decoder& decoder, T embedding, T embedding_norm, T feature_norm, const Projection* fuse,
         bool before_residual, bool feed_back, const Projection& head, T vocabulary, T tokens, T hidden_states,
         T k_cache, T v_cache, T block_table, T lengths, T row_start, T cos, T sin, float least, T children, T scores,
         T levels) {
        run_op("draft_backbone",
               DraftBackbone{decoder,   embedding,   embedding_norm, feature_norm, fuse,          before_residual,
                             feed_back, head,        vocabulary,     tokens,       hidden_states, k_cache,
                             v_cache,   block_table, lengths,        row_start,    cos,           sin,
                             least,     children,    scores,         levels});
      },
      nogil, py::arg("decoder"), py::arg("embedding"), py::arg("embedding_norm"), py::arg("feature_norm"),
      py::arg("fuse"), py::arg("before_residual"), py::arg("feed_back"), py::arg("head"), py::arg("vocabulary"),
      py::arg("tokens"), py::arg("hidden_states"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"),
      py::arg("lengths"), py::arg("row_start"), py::arg("cos"), py::arg("sin"), py::arg("least"), py::arg("children"),
      py::arg("scores"), py::arg("levels"));
  m.def(
      "select_nodes",
      [](T tokens, T parents, T depths, T scores, T limits, T out_tokens, T out_parents, T out_depths, T kept,
         T ancestors, T node_counts) {
        run_op("select_nodes", SelectNodes{tokens, parents, depths, scores, limits, out_tokens, out_parents, out_depths,
                                           kept, ancestors, node_counts});
      },
      nogil, py::arg("tokens"), py::arg("parents"), py::arg("depths"), py::arg("scores"), py::arg("limits"),
      py::arg("out_tokens"), py::arg("out_parents"), py::arg("out_depths"), py::arg("kept"), py::arg("ancestors"),
      py::arg("node_counts"));

  m.def(
      "draw_siblings",
      [](T logits, T requests, T nodes, T index, T tokens, T parents, T row_start, const Columns<11>& sampling,
         const Columns<3>& history, T drawn, T scores, T counts, T weights, bool replacement, bool as_match) {
        run_op("draw_siblings", DrawSiblings{trees_of(tokens, parents, row_start, sampling, history), logits, requests,
                                             nodes, index, drawn, scores, counts, weights, replacement, as_match});
      },
      nogil, py::arg("logits"), py::arg("requests"), py::arg("nodes"), py::arg("index"), py::arg("tokens"),
      py::arg("parents"), py::arg("row_start"), py::arg("sampling"), py::arg("history"), py::arg("drawn"),
      py::arg("scores"), py::arg("counts"), py::arg("weights"), py::arg("replacement"), py::arg("as_match"));

  m.def(
      "draft_lookup",
      [](T history, T history_length, T final_length, T active, T tokens, T parents, T depths, T ancestors,
         int64_t min_ngram, int64_t max_ngram) {
        run_op("draft_lookup", DraftLookup{history, history_length, final_length, active, tokens, parents, depths,
                                           ancestors, min_ngram, max_ngram});
      },
      nogil, py::arg("history"), py::arg("history_length"), py::arg("final_length"), py::arg("active"),
      py::arg("tokens"), py::arg("parents"), py::arg("depths"), py::arg("ancestors"), py::arg("min_ngram"),
      py::arg("max_ngram"));

  // verify and accept
  m.def(
      "verify_tree",
      [](T logits, T drawn, T tokens, T parents, T row_start, const Columns<11>& sampling, const Columns<3>& history,
         T draft_logits, T draft_rows, T draft_index, bool replacement, T path, T path_length, T bonus, T relaxed,
         T scores, T counts, T row_states, T weights, const std::string& rule, const std::vector<double>& options) {
        run_op("verify_tree", VerifyTree{trees_of(tokens, parents, row_start, sampling, history),
                                         logits,
                                         drawn,
                                         {draft_logits, draft_rows, draft_index, replacement},
                                         path,
                                         path_length,
                                         bonus,
                                         relaxed,
                                         scores,
                                         counts,
                                         row_states,
                                         weights,
                                         rule,
                                         options});
      },
      nogil, py::arg("logits"), py::arg("drawn"), py::arg("tokens"), py::arg("parents"), py::arg("row_start"),
      py::arg("sampling"), py::arg("history"), py::arg("draft_logits"), py::arg("draft_rows"), py::arg("draft_index"),
      py::arg("replacement"), py::arg("path"), py::arg("path_length"), py::arg("bonus"), py::arg("relaxed"),
      py::arg("scores"), py::arg("counts"), py::arg("row_states"), py::arg("weights"), py::arg("rule"),
      py::arg("options"));

  m.def(
      "commit_tokens",
      [](T tokens, T parents, T path, T path_length, T bonus, T relaxed, T eos, T ignores_eos, T final_length,
         T history, T history_length, T active, T record) {
        run_op("commit_tokens", CommitTokens{tokens, parents, path, path_length, bonus, relaxed, eos, ignores_eos,
                                             final_length, history, history_length, active, record});
      },
      nogil, py::arg("tokens"), py::arg("parents"), py::arg("path"), py::arg("path_length"), py::arg("bonus"),
      py::arg("relaxed"), py::arg("eos"), py::arg("ignores_eos"), py::arg("final_length"), py::arg("history"),
      py::arg("history_length"), py::arg("active"), py::arg("record"));

  // compact
  m.def(
      "compact_kv",
      [](T k_cache, T v_cache, T block_table, T lengths, T path, T path_length) {
        run_op("compact_kv", CompactKv{k_cache, v_cache, block_table, lengths, path, path_length});
      },
      nogil, py::arg("k_cache"), py::arg("v_cache"), py::arg("block_table"), py::arg("lengths"), py::arg("path"),
      py::arg("path_length"));

#if !defined(SPECENGINE_OPS_ONLY)  // a second module in one process must not register the pools' classes again
  // what drafters without weights remember: nothing of it is on a device
  add_pools(m);
#endif

  // the build and the machine
  m.attr("PAGE_SIZE") = kPageSize;
  m.attr("MAX_NODES") = kMaxNodes;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("PANEL") = kPanel;
  m.attr("BLOCK") = kBlock;
  m.attr("ROW_BLOCK_BYTES") = kRowBlockBytes;
  m.attr("Q8_BYTES") = kQ8Bytes;
  m.attr("Q4_BYTES") = kQ4Bytes;
  m.attr("Q4_MIN_BYTES") = kQ4MinBytes;
  m.attr("VOCABULARY_PART") = kVocabularyPart;
  m.attr("NOISE_BLOCK") = kNoiseBlock;
  m.attr("LINEAR_VARIANTS") = linear_variants();
  m.attr("ROW_STATE_WORDS") = kRowStateWords;
  m.attr("WEIGHT_PLANES") = kWeightPlanes;
  m.def("num_threads", &num_threads);
  m.def("set_num_threads", &set_num_threads, py::arg("n"));
  m.attr("instruction_sets") = instruction_sets();
  m.def("instruction_set", [] { return name_of(active_isa()); });
  m.def("set_instruction_set", [](const std::string& name) {
    for (Isa isa : kIsas) {
      if (name == name_of(isa) && runs_here(isa)) return void(active_isa() = isa);
    }
    fail("name: instruction set '", name, "' is not in this build or not on this machine");
  });
#if defined(SPECENGINE_HAVE_CUDA)
  m.def("set_programmatic_launch", &set_programmatic_launch, py::arg("enabled"));
#endif
  m.attr("cuda_architectures") = cuda_architectures();
  m.attr("compiler") = SPECENGINE_COMPILER;
#if defined(SPECENGINE_SIM)
  sim::add_to(m);
#endif
}
