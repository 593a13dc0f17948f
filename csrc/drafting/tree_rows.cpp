#include "drafting/tree_rows.h"

namespace specengine {

TreeRows::TreeRows(const TensorView& tokens, const TensorView& parents, const TensorView& depths,
                   const TensorView& row_start, const OptionalTensor& ancestors)
    : tokens_(tokens.as<int32_t>()),
      parents_(parents.as<int32_t>()),
      depths_(depths.as<int32_t>()),
      row_start_(row_start.as<int32_t>()),
      ancestors_(ancestors.defined() ? ancestors.as<uint32_t>() : nullptr),
      rows_(tokens.shape[0]),
      requests_(row_start.shape[0] - 1),
      words_(ancestors.defined() ? ancestors.shape[1] : 0) {
  Checker check;
  Dim M{"M"}, starts{"B + 1"}, W{"W"};
  check(tokens, "tokens", {DType::kInt32}, {M});
  check(parents, "parents", {DType::kInt32}, {M});
  check(depths, "depths", {DType::kInt32}, {M});
  check(row_start, "row_start", {DType::kInt32}, {starts});
  check.optional(ancestors, "ancestors", {DType::kInt32}, {M, W});
  if (check.device() != Device::kCpu) fail("tokens: expected a tensor on the CPU");
  if (starts < 1) fail("row_start: expected at least one entry");
}

void TreeRows::write(std::span<const std::vector<int32_t>> tokens,
                     std::span<const std::vector<int32_t>> parents) const {
  if (static_cast<int64_t>(tokens.size()) != requests_ || tokens.size() != parents.size()) {
    fail("tokens: expected ", requests_, " trees, got ", tokens.size());
  }
  int64_t rows = 0;
  for (size_t b = 0; b < tokens.size(); ++b) {
    check_tree(tokens[b], parents[b]);
    rows += static_cast<int64_t>(tokens[b].size());
    if (ancestors_ && static_cast<int64_t>(tokens[b].size()) > 32 * words_) {
      fail("tokens: ", tokens[b].size(), " nodes are more than ", words_, " words of bits can hold");
    }
  }
  if (rows != rows_) fail("tokens: expected ", rows_, " nodes in all, got ", rows);
  int64_t first = 0;
  for (size_t b = 0; b < tokens.size(); ++b) {
    row_start_[b] = static_cast<int32_t>(first);
    std::copy(tokens[b].begin(), tokens[b].end(), tokens_ + first);
    std::copy(parents[b].begin(), parents[b].end(), parents_ + first);
    for (size_t node = 0; node < tokens[b].size(); ++node) {
      const int64_t row = first + static_cast<int64_t>(node), above = first + parents[b][node];
      depths_[row] = node == 0 ? 0 : depths_[above] + 1;
      if (ancestors_ == nullptr) continue;
      uint32_t* bits = ancestors_ + row * words_;
      if (node == 0) {
        std::fill_n(bits, words_, 0u);
      } else {
        std::copy_n(ancestors_ + above * words_, words_, bits);
      }
      bits[node / 32] |= 1u << node % 32;
    }
    first += static_cast<int64_t>(tokens[b].size());
  }
  row_start_[requests_] = static_cast<int32_t>(first);
}

}  // namespace specengine
