// Row-wise ops: one task owns one row, and every reduction of a row is in the order of its columns.
#include "ops/layer.h"

#include <algorithm>
#include <vector>

#include "cpu/parallel_for.h"
#include "cpu/row_norm.h"
#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

int32_t reduce(i32x8 v, i32x8 (*combine)(i32x8, i32x8)) {
  v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  return combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}

void store_codes(int8_t* out, const i32x8 (&codes)[4]) {
#if defined(__AVX2__)
  const auto wide = [&](int i) { return reinterpret_cast<__m256i>(codes[i]); };
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(wide(0), wide(1)), _mm256_packs_epi32(wide(2), wide(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing keeps the 128-bit halves apart
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (int i = 0; i < 32; ++i) out[i] = static_cast<int8_t>(codes[i / kLanes][i % kLanes]);
#endif
}

// One row of C floats to int8 with a scale per 32 columns, rounded to nearest even.
void quantise_row(const float* x, int64_t columns, RowBlock* out) {
  constexpr int kVectors = kBlock / kLanes;
  constexpr float kTiny = 1e-35f;  // a block without larger entries becomes 0: the inverse of its scale may be infinite
  for (int64_t first = 0; first < columns; first += kBlock, ++out) {
    float padded[kBlock] = {};
    const float* block = x + first;
    if (columns - first < kBlock) {
      std::memcpy(padded, block, (columns - first) * sizeof(float));
      block = padded;
    }
    i32x8 largest = {};  // magnitude as an integer: they order as the floats do, non-finite ones above all
    for (int i = 0; i < kVectors; ++i) {
      i32x8 bits;
      std::memcpy(&bits, block + i * kLanes, sizeof(bits));
      bits &= INT32_MAX;
      largest = bits > largest ? bits : largest;
    }
    const int32_t top_bits = reduce(largest, [](i32x8 a, i32x8 b) { return a > b ? a : b; });
    float top;
    std::memcpy(&top, &top_bits, sizeof(top));
    const bool finite = top_bits < 0x7F800000;
    const f32x8 inverse = splat(finite && top > kTiny ? 127.0f / top : 0.0f);
    const f32x8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
    i32x8 codes[kVectors], total = {};
    for (int i = 0; i < kVectors; ++i) {
      const f32x8 shifted = load8(block + i * kLanes) * inverse + magic;
      std::memcpy(&codes[i], &shifted, sizeof(shifted));
      codes[i] = finite ? codes[i] - 0x4B400000 : i32x8{};
      total += codes[i];
    }
    store_codes(out->code, codes);
    out->code_sum = reduce(total, [](i32x8 a, i32x8 b) { return a + b; });
    out->scale = finite ? top * (1.0f / 127.0f) : NAN;
    out->sum = out->scale * static_cast<float>(out->code_sum);
  }
}

// Fills row m of an activation. A row to be quantised goes through a buffer of the thread, which the first such row
// allocates.
template <typename Fill>
void fill_activation(const TensorView& out, int64_t m, int64_t columns, const Fill& fill) {
  if (out.dtype != DType::kUInt8) return fill(out.as<float>() + m * columns);
  thread_local std::vector<float> row;
  if (static_cast<int64_t>(row.size()) < columns) row.resize(columns);
  fill(row.data());
  quantise_row(row.data(), columns, out.as<RowBlock>() + m * out.shape[1]);
}

// The norm of one row's heads: each head's own, or one for all where the weight has their size.
class HeadNorm {
 public:
  HeadNorm(const OptionalTensor& weight, const float* heads, int64_t count, int64_t dim, float eps)
      : weight_(weight.defined() ? weight.as<float>() : nullptr), dim_(dim), eps_(eps) {
    whole_ = weight_ && weight.shape[0] > dim;
    if (whole_) scale_ = inverse_rms(heads, count * dim, eps);
  }
  const float* weight(int64_t head) const { return whole_ ? weight_ + head * dim_ : weight_; }
  float scale(const float* head) const { return whole_ || !weight_ ? scale_ : inverse_rms(head, dim_, eps_); }

 private:
  const float* weight_;
  int64_t dim_;
  float eps_, scale_ = 1.0f;
  bool whole_;
};

// Rotates the first `rotated` components of a head: pairs (i, i + rotated/2), as the Hugging Face layout of these
// models has them. The others stay.
template <typename Out>
void rotate(const float* head, const float* norm, float scale, const float* cos, const float* sin, int64_t rotated,
            int64_t dim, Out* out) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; ++i) {
    float a = head[i], b = head[i + half];
    if (norm) a = a * scale * norm[i], b = b * scale * norm[i + half];
    store1(out + i, a * cos[i] - b * sin[i]);
    store1(out + i + half, b * cos[i] + a * sin[i]);
  }
  for (int64_t i = rotated; i < dim; ++i) store1(out + i, norm ? head[i] * scale * norm[i] : head[i]);
}

template <typename Cache>
void rope_cache(const RopeCache& op) {
  const int64_t M = op.q.shape[0], H = op.q.shape[1], K = op.cache.heads(), D = op.cache.dim();
  const int64_t half = op.cos.shape[1], stride = op.gated() ? 2 * D : D;  // of two heads of q
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  parallel_for(M, [&](int64_t m) {
    const int64_t b = request_of(row_start, m), length = op.cache.lengths.as<int32_t>()[b];
    const int64_t position = length + op.depths.as<int32_t>()[m],
                  slot = length + op.cache.first_node + m - row_start[b];
    const float* cos = op.cos.as<float>() + position * half;
    const float* sin = op.sin.as<float>() + position * half;
    const float* row = op.qkv.as<float>() + m * op.qkv.shape[1] + op.first;
    const float* keys = row + H * stride;
    const HeadNorm q_norm(op.q_norm, row, H, D, op.eps), k_norm(op.k_norm, keys, K, D, op.eps);
    for (int64_t h = 0; h < H; ++h) {
      const float* q = row + h * stride;
      rotate(q, q_norm.weight(h), q_norm.scale(q), cos, sin, 2 * half, D, op.q.as<float>() + (m * H + h) * D);
    }
    for (int64_t h = 0; h < K; ++h) {
      const int64_t offset = op.cache.offset(b, slot, h);
      const float *k = keys + h * D, *v = keys + (K + h) * D;
      rotate(k, k_norm.weight(h), k_norm.scale(k), cos, sin, 2 * half, D, op.cache.k_cache.as<Cache>() + offset);
      for (int64_t i = 0; i < D; ++i) store1(op.cache.v_cache.as<Cache>() + offset + i, v[i]);
    }
  });
}

}  // namespace

void run(const RmsNorm& op) {
  if (op.residual.numel() == 0) return;
  const int64_t C = op.residual.shape[1], layers = op.kept.given() ? op.kept.shape[1] : 0;
  parallel_for(op.residual.shape[0], [&](int64_t m) {
    const float* weight = op.weight.as<float>() + m % op.weights() * C;
    float* x = op.residual.as<float>() + m * C;
    if (op.delta.defined()) {
      const float* delta = op.delta.as<float>() + m * C;
      for (int64_t c = 0; c < C; ++c) x[c] += delta[c];
    }
    if (layers > 0) std::copy(x, x + C, op.kept.as<float>() + (m * layers + op.place) * C);
    const float scale = inverse_rms(x, C, op.eps);
    fill_activation(op.out, m, C, [&](float* out) {
      for (int64_t c = 0; c < C; ++c) out[c] = x[c] * scale * weight[c];
    });
  });
}

void run(const SiluMul& op) {
  const int64_t I = op.gate_up.shape[1] / 2;
  parallel_for(op.gate_up.shape[0], [&](int64_t m) {
    const float* gate = op.gate_up.as<float>() + m * 2 * I;
    const float* up = gate + I;
    fill_activation(op.out, m, I, [&](float* out) {
      int64_t i = 0;
      for (; i + kLanes <= I; i += kLanes) {
        const f32x8 g = load8(gate + i);
        store8(out + i, g / (splat(1.0f) + exp8(-g)) * load8(up + i));
      }
      for (; i < I; ++i) out[i] = gate[i] / (1.0f + exp1(-gate[i])) * up[i];
    });
  });
}

void run(const GateHeads& op) {
  const int64_t H = op.heads.shape[1], D = op.heads.shape[2];
  parallel_for(op.heads.shape[0], [&](int64_t m) {
    for (int64_t h = 0; h < H; ++h) {
      const float* gate = op.qkv.as<float>() + m * op.qkv.shape[1] + (2 * h + 1) * D;
      float* head = op.heads.as<float>() + (m * H + h) * D;
      int64_t i = 0;
      for (; i + kLanes <= D; i += kLanes) store8(head + i, load8(head + i) / (splat(1.0f) + exp8(-load8(gate + i))));
      for (; i < D; ++i) head[i] /= 1.0f + exp1(-gate[i]);
    }
  });
}

void run(const ClampedSwiglu& op) {
  const int64_t I = op.gate_up.shape[1] / 2;
  const f32x8 limit = splat(op.limit), alpha = splat(op.alpha), one = splat(1.0f);
  const auto limited = [&](f32x8 gate, f32x8 up) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return (up + one) * (gate / (one + exp8(-alpha * gate)));
  };
  parallel_for(op.gate_up.shape[0], [&](int64_t m) {
    const float* gate = op.gate_up.as<float>() + m * 2 * I;
    const float* up = gate + I;
    fill_activation(op.out, m, I, [&](float* out) {
      int64_t i = 0;
      for (; i + kLanes <= I; i += kLanes) store8(out + i, limited(load8(gate + i), load8(up + i)));
      for (; i < I; ++i) out[i] = limited(splat(gate[i]), splat(up[i]))[0];
    });
  });
}

void run(const QuantiseRows& op) {
  const int64_t C = op.x.shape[1];
  parallel_for(op.x.shape[0], [&](int64_t m) {
    const float* x = op.x.as<float>() + m * C;
    if (!op.columns.defined()) return quantise_row(x, C, op.out.as<RowBlock>() + m * op.out.shape[1]);
    const int32_t* columns = op.columns.as<int32_t>();
    fill_activation(op.out, m, C, [&](float* row) {
      for (int64_t c = 0; c < C; ++c) row[c] = x[columns[c]];
    });
  });
}

void run(const RopeCache& op) {
  op.cache.validate_rows(op.q.shape[0]);
  check_depths(op.cache, op.depths, op.cos.shape[0]);
  with_float_type(op.cache.k_cache.dtype, [&](auto zero) { rope_cache<decltype(zero)>(op); });
}

}  // namespace specengine::SPECENGINE_ISA
