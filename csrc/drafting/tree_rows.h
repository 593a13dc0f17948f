// The tensors of one target pass over trees, written again and again for trees of the same sizes.
#pragma once
#include "base/tensor_view.h"
#include "drafting/node_children.h"

namespace specengine {

class TreeRows {
 public:
  // Borrows the tensors of a TreeBatch. tokens, parents, depths: int32 [M].  row_start: int32 [B + 1].
  // ancestors: int32 bits [M, W]; not there where every tree is a chain.
  TreeRows(const TensorView& tokens, const TensorView& parents, const TensorView& depths, const TensorView& row_start,
           const OptionalTensor& ancestors);

  // Writes B trees of M nodes in all.
  void write(std::span<const std::vector<int32_t>> tokens, std::span<const std::vector<int32_t>> parents) const;

 private:
  int32_t *tokens_, *parents_, *depths_, *row_start_;
  uint32_t* ancestors_;  // null: not there
  int64_t rows_, requests_, words_;
};

}  // namespace specengine
