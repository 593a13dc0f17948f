#include "networks/network.h"

namespace specengine {

int64_t DraftInputs::check_hidden_states(Checker& check) const {
  Dim M{"M", tokens.shape[0], "runs"}, R{"R"}, F{"F"};
  check(hidden_states, "hidden_states", {DType::kFloat32}, {R, F});
  if (check.device() != Device::kCpu) fail("hidden_states: expected a tensor on cpu");
  check(rows, "rows", {DType::kInt32}, {M});
  check_ids(rows, "rows", R);
  return F;
}

void DraftInputs::check_chains(Checker& check, const Decoder& d, int64_t vocab, int64_t further_slots,
                               int64_t further_positions, bool target) const {
  const size_t wanted = target ? 2 : 1;
  if (caches.size() != wanted) fail("caches: expected ", wanted, " of them, got ", caches.size());
  Dim positions{"positions"};
  KvCacheView own = cache(0);
  own.validate(check, static_cast<int64_t>(d.layers.size()), d.kv_heads, d.head_dim);
  check(caches[0].cos, "cos", {DType::kFloat32}, {positions, d.rotated / 2});
  check(caches[0].sin, "sin", {DType::kFloat32}, {positions, d.rotated / 2});
  if (check.device() != Device::kCpu) fail("k_cache: expected a tensor on cpu");
  if (further_slots >= kMaxNodes)
    fail("levels: expected at most ", kMaxNodes, " expanded nodes, got ", further_slots + 1);
  own = own.layer(0);
  own.first_node = further_slots;
  own.validate_rows(tokens.shape[0]);
  for (int64_t b = 0; b < requests(); ++b) {
    const int64_t deepest = ends.as<int32_t>()[b] - 1 + further_positions;
    if (deepest >= positions) fail("cached: position ", deepest, " is past the ", positions.value, " rows of cos");
  }
  check_ids(tokens, "runs", vocab);
}

void check_children(const DraftSizes& sizes, int64_t head_rows) {
  const int64_t most = std::min<int64_t>(kMaxNodes - 1, head_rows);
  if (sizes.children < 1 || sizes.children > most) {
    fail("children: expected 1 to ", most, ", got ", sizes.children);
  }
}

}  // namespace specengine
