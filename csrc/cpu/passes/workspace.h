// Tensors one after the other in the caller's memory, for ops that call other ops.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "ops/decoder.h"

namespace specengine {

inline TensorView tensor(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view;
  view.data = data, view.dtype = dtype, view.device = Device::kCpu, view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t stride = 1;
  for (int i = view.ndim - 1; i >= 0; --i) view.strides[i] = stride, stride *= view.shape[i];
  return view;
}

// Without memory it only counts bytes.
class Workspace {
 public:
  explicit Workspace(uint8_t* data) : data_(data) {}

  TensorView floats(std::initializer_list<int64_t> shape) { return place(DType::kFloat32, sizeof(float), shape); }
  TensorView ints(std::initializer_list<int64_t> shape) { return place(DType::kInt32, sizeof(int32_t), shape); }
  TensorView bytes(int64_t count) { return place(DType::kUInt8, 1, {count}); }
  // Rows of C columns in the form that the projection multiplies.
  template <typename AnyProjection>
  TensorView rows(int64_t M, int64_t C, const AnyProjection& reader) {
    return reader.quantises_rows() ? place(DType::kUInt8, 1, {M, blocks_of(C), kRowBlockBytes}) : floats({M, C});
  }
  int64_t used() const { return used_; }

 private:
  TensorView place(DType dtype, int64_t size, std::initializer_list<int64_t> shape) {
    TensorView view = tensor(data_ ? data_ + used_ : nullptr, dtype, shape);
    used_ += (view.numel() * size + 63) / 64 * 64;
    return view;
  }

  uint8_t* data_;
  int64_t used_ = 0;
};

}  // namespace specengine
