// Tensors one after the other in the caller's memory, for ops that call other ops.
#pragma once
#include <algorithm>
#include <initializer_list>
#include <memory>

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

// Tensors in memory of their own, which lives as long as it. Nothing is written before its use.
class Scratch {
 public:
  TensorView floats(std::initializer_list<int64_t> shape) { return place(DType::kFloat32, shape); }
  TensorView ints(std::initializer_list<int64_t> shape) { return place(DType::kInt32, shape); }
  TensorView longs(std::initializer_list<int64_t> shape) { return place(DType::kInt64, shape); }
  TensorView bytes(int64_t count) { return place(DType::kUInt8, {count}); }
  TensorView rows(int64_t M, int64_t C, const Projection& reader) {
    return reader.quantises_rows() ? place(DType::kUInt8, {M, blocks_of(C), kRowBlockBytes}) : floats({M, C});
  }

 private:
  TensorView place(DType dtype, std::initializer_list<int64_t> shape) {
    constexpr int64_t kAlignment = 64;
    TensorView view = tensor(nullptr, dtype, shape);
    made_.emplace_back(new uint8_t[bytes_of(view) + kAlignment]);
    view.data = made_.back().get() + (kAlignment - reinterpret_cast<uintptr_t>(made_.back().get()) % kAlignment);
    return view;
  }

  std::vector<std::unique_ptr<uint8_t[]>> made_;
};

// `count` rows of a contiguous tensor, from `first` on.
inline TensorView rows_of(TensorView x, int64_t first, int64_t count) {
  x.shape[0] = count;
  if (x.data) x.data = x.as<uint8_t>() + first * x.strides[0] * bytes_of(x.dtype);
  return x;
}

// A tensor [M, ..] with all dimensions but the first flattened.
inline TensorView as_rows(const TensorView& x) { return tensor(x.data, x.dtype, {x.shape[0], x.numel() / x.shape[0]}); }

// Row i of `out`, float32 [n, C], becomes row picked[i] of x.
template <typename Index>
void take_rows(const TensorView& x, const Index* picked, const TensorView& out) {
  const int64_t C = out.numel() / std::max<int64_t>(1, out.shape[0]);
  for (int64_t i = 0; i < out.shape[0]; ++i) {
    std::copy_n(x.as<float>() + picked[i] * C, C, out.as<float>() + i * C);
  }
}

// out = [left | right], float32.
inline void join_columns(const TensorView& left, const TensorView& right, const TensorView& out) {
  const int64_t L = left.shape[1], R = right.shape[1];
  for (int64_t m = 0; m < out.shape[0]; ++m) {
    std::copy_n(left.as<float>() + m * L, L, out.as<float>() + m * (L + R));
    std::copy_n(right.as<float>() + m * R, R, out.as<float>() + m * (L + R) + L);
  }
}

// The projection of rows of floats [M, C].
inline void multiply(const TensorView& x, const Projection& projection, const TensorView& out) {
  if (!projection.quantises_rows()) return project(x, projection, out);
  Scratch own;
  const TensorView rows = own.rows(x.shape[0], x.shape[1], projection);
  run_cpu(QuantiseRows{x, rows});
  project(rows, projection, out);
}

}  // namespace specengine
