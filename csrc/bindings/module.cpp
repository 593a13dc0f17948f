// The op table: every op on one page, in the order of a cycle. An op's arguments are the members of its struct in ops/.
#include "bindings/bind.h"
#include "bindings/draft_lists.h"
#include "bindings/files.h"
#include "bindings/machine.h"
#include "bindings/pools.h"
#include "bindings/trees.h"
#include "ops/coded/linear.h"
#include "ops/commit_tokens.h"
#include "ops/compact_kv.h"
#include "ops/decoder.h"
#include "ops/draft_lookup.h"
#include "ops/draw_siblings.h"
#include "ops/expand_backbone.h"
#include "ops/experts/coded_experts.h"
#include "ops/experts/experts.h"
#include "ops/file_blocks.h"
#include "ops/fused/fused_linear.h"
#include "ops/fused/gather_norm.h"
#include "ops/growth/add_copies.h"
#include "ops/growth/add_delta.h"
#include "ops/growth/best_tokens.h"
#include "ops/growth/expand_level.h"
#include "ops/growth/expand_levels.h"
#include "ops/growth/expand_node.h"
#include "ops/growth/grow_level.h"
#include "ops/growth/gru_step.h"
#include "ops/growth/pairs.h"
#include "ops/growth/row_inputs.h"
#include "ops/growth/select_limited.h"
#include "ops/growth/text_rows.h"
#include "ops/layer.h"
#include "ops/linear.h"
#include "ops/lora.h"
#include "ops/select_nodes.h"
#include "ops/tree_attention.h"
#include "ops/verify_tree.h"
#if defined(SPECENGINE_SIM)
#include "sim/module.h"
#endif

using namespace specengine;

PYBIND11_MODULE(SPECENGINE_MODULE, m) {
  // records: structs of tensors that several ops take
  add_record<CodedForm>(m);
  add_record<KvCacheView>(m);
  add_record<Multipliers>(m);
  add_record<RopeTables>(m);
  add_record<RotatedRows>(m);
  add_record<PassOutputs>(m);
  add_record<DeltaStates>(m);
  add_record<SamplingTable>(m);
  add_record<TokenHistory>(m);
  add_record<SampledTrees>(m);
  add_record<DraftLogits>(m);
  add_record<AcceptedPaths>(m);
  add_record<VerifyWorkspace>(m);
  add_record<BackboneTrees>(m);
  add_record<CandidateColumns>(m);
  add_record<BeamRows>(m);
  add_record<LevelEntries>(m);
  add_record<VocabularyParts>(m);
  add_record<LevelLogits>(m);
  add_record<LevelShape>(m);
  add_record<DepthLimits>(m);
  add_record<OpenedNodes>(m);
  add_record<SelectedTrees>(m);
  add_record<ChainColumns>(m);
  add_record<SeenKeys>(m);

  // weights
  bind_op<PackLinear>(m, "pack_linear");
  bind_op<PackBlocks>(m, "pack_blocks");
  bind_op<PackCoded>(m, "pack_coded");
  bind_op<RequantiseBlocks>(m, "requantise_blocks");
  bind_op<UnpackBlocks>(m, "unpack_blocks");

  // target forward
  bind_op<GatherRows>(m, "gather_rows");
  bind_op<QuantiseRows>(m, "quantise_rows");
  bind_op<Linear>(m, "linear");
  bind_op<LinearArgmax>(m, "linear_argmax");
  bind_op<LinearSilu>(m, "linear_silu");
  bind_op<LinearNorm>(m, "linear_norm");
  bind_op<LinearRope>(m, "linear_rope");
  bind_op<GatherCoded>(m, "gather_coded");
  bind_op<CodedLinear>(m, "coded_linear");
  bind_op<CodedLinearArgmax>(m, "coded_linear_argmax");
  bind_op<RmsNorm>(m, "rms_norm");
  bind_op<GatherNorm>(m, "gather_norm");
  bind_op<SiluMul>(m, "silu_mul");
  bind_op<ClampedSwiglu>(m, "clamped_swiglu");
  bind_op<RopeCache>(m, "rope_cache");
  bind_op<GateHeads>(m, "gate_heads");
  bind_class<GatedDeltaLayer>(m, "GatedDeltaLayer");
  bind_op<GatedDelta>(m, "gated_delta");
  bind_op<TreeAttention>(m, "tree_attention");
  bind_workspace<TreeAttention>(m, "tree_attention_workspace", "tree_attention");
  bind_class<Projection>(m, "Projection");
  bind_op<RouteRows>(m, "route_rows");
  bind_op<GroupPairs>(m, "group_pairs");
  bind_op<ExpertLinear>(m, "expert_linear");
  bind_op<CodedExpertLinear>(m, "coded_expert_linear");
  bind_op<CombineExperts>(m, "combine_experts");
  bind_class<ExpertProjection>(m, "ExpertProjection");
  bind_class<MoeLayer>(m, "MoeLayer");
  bind_class<LoraModule>(m, "LoraModule");
  bind_class<LoraProjection>(m, "LoraProjection")
      .def("workspace_floats", &LoraProjection::workspace_floats, pybind11::arg("rows"));
  bind_class<LoraLayer>(m, "LoraLayer");
  bind_op<AddLora>(m, "add_lora");
  bind_class<DecoderLayer>(m, "DecoderLayer");
  bind_class<Decoder>(m, "Decoder").def("workspace_bytes", &Decoder::workspace_bytes, pybind11::arg("rows"));
  bind_op<DecoderPass>(m, "decoder_pass");

  // draft
  bind_op<ExpandBackbone>(m, "expand_backbone");
  add_networks(m);
  bind_op<PairRows>(m, "pair_rows");
  bind_op<KeepPairs>(m, "keep_pairs");
  bind_op<KeepLast>(m, "keep_last");
  bind_op<TextRows>(m, "text_rows");
  bind_op<JoinRows>(m, "join_rows");
  bind_op<AddDelta>(m, "add_delta");
  bind_op<GruStep>(m, "gru_step");
  bind_op<AddCopies>(m, "add_copies");
  bind_op<GrowLevel>(m, "grow_level");
  bind_op<ExpandLevel>(m, "expand_level");
  bind_op<BestTokens>(m, "top_tokens");
  bind_op<ExpandLevels>(m, "expand_levels");
  bind_op<ExpandNode>(m, "expand_node");
  bind_op<SelectLimited>(m, "select_limited");
  bind_op<SelectNodes>(m, "select_nodes");
  bind_op<DrawSiblings>(m, "draw_siblings");
  bind_op<DraftLookup>(m, "draft_lookup");

  // verify and accept
  bind_op<VerifyTree>(m, "verify_tree");
  bind_op<CommitTokens>(m, "commit_tokens");

  // compact
  bind_op<CompactKv>(m, "compact_kv");
  bind_op<CompactStates>(m, "compact_states");

#if !defined(SPECENGINE_OPS_ONLY)  // a second module in one process must not register the pools' classes again
  // token pools of drafters without weights, and drafted trees, on the host
  add_pools(m);
  add_trees(m);
  // readers of files
  add_files(m);
#endif

  // the build and the machine
  add_machine(m);
#if defined(SPECENGINE_SIM)
  sim::add_to(m);
#endif
}
