// Row-wise ops: one task owns one row, and every reduction of a row is in the order of its columns.
#include "ops/layer.h"

#include <vector>

#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

float inverse_rms(const float* x, int64_t columns, float eps) {
  f32x8 sum = {};
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) sum = fmadd(load8(x + c), load8(x + c), sum);
  float total = sum8(sum);
  for (; c < columns; ++c) total = fmadd(x[c], x[c], total);
  return 1.0f / std::sqrt(total / static_cast<float>(columns) + eps);
}

// Small row counts are not worth waking a worker for.
template <typename Body>
void for_rows(int64_t rows, const Body& body) {
  constexpr int64_t kRowsPerTask = 8;
  parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t m = task * kRowsPerTask; m < std::min(rows, (task + 1) * kRowsPerTask); ++m) body(m);
  });
}

// Entries up to this become 0: the inverse of a scale below it is infinite.
constexpr float kTiny = 1e-35f;

// One row of C floats to int8 with a scale per 32 columns, rounded to nearest even.
void quantise_row(const float* x, int64_t columns, RowBlock* out) {
  for (int64_t first = 0; first < columns; first += kBlock, ++out) {
    float padded[kBlock] = {};
    const float* block = x + first;
    if (columns - first < kBlock) {
      std::memcpy(padded, block, (columns - first) * sizeof(float));
      block = padded;
    }
    f32x8 largest = {}, poison = {};  // max8 passes over a NaN
    for (int64_t c = 0; c < kBlock; c += kLanes) {
      const f32x8 v = load8(block + c);
      largest = max8(v < 0.0f ? -v : v, largest);
      poison = poison + v * 0.0f;  // 0, or NaN if an entry is not finite
    }
    out->scale = max_of(largest) * (1.0f / 127.0f) + sum8(poison);
    if (out->scale != out->scale) {  // codes of such a block would be any bytes, and their sum overflow
      std::memset(out->code, 0, sizeof(out->code));
      out->sum = out->scale, out->code_sum = 0;
      continue;
    }
    const float top = max_of(largest), inverse = top > kTiny ? 127.0f / top : 0.0f;
    const f32x8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, found in the low bits
    i32x8 total = {};
    for (int64_t c = 0; c < kBlock; c += kLanes) {
      const f32x8 shifted = load8(block + c) * splat(inverse) + magic;
      i32x8 code;
      std::memcpy(&code, &shifted, sizeof(code));
      code -= 0x4B400000;
      total += code;
      const i8x8 narrow = __builtin_convertvector(code, i8x8);
      std::memcpy(out->code + c, &narrow, sizeof(narrow));
    }
    out->code_sum = 0;
    for (int i = 0; i < kLanes; ++i) out->code_sum += total[i];
    out->sum = out->scale * static_cast<float>(out->code_sum);
  }
}

// Fills row m of an activation, through a buffer of the thread where it has to be quantised.
template <typename Fill>
void fill_activation(const TensorView& out, int64_t m, int64_t columns, const Fill& fill) {
  if (out.dtype != DType::kUInt8) return fill(out.as<float>() + m * columns);
  thread_local std::vector<float> row;
  if (static_cast<int64_t>(row.size()) < columns) row.resize(columns);
  fill(row.data());
  quantise_row(row.data(), columns, out.as<RowBlock>() + m * out.shape[1]);
}

// Rotates one head: pairs (i, i + D/2), as the Hugging Face layout of these models has them.
template <typename Out>
void rotate(const float* head, const float* norm, float eps, const float* cos, const float* sin, int64_t dim,
            Out* out) {
  const int64_t half = dim / 2;
  const float scale = norm ? inverse_rms(head, dim, eps) : 1.0f;
  for (int64_t i = 0; i < half; ++i) {
    float a = head[i], b = head[i + half];
    if (norm) a = a * scale * norm[i], b = b * scale * norm[i + half];
    store1(out + i, a * cos[i] - b * sin[i]);
    store1(out + i + half, b * cos[i] + a * sin[i]);
  }
}

template <typename Cache>
void rope_cache(const RopeCache& op) {
  const int64_t M = op.q.shape[0], H = op.q.shape[1], K = op.cache.K, D = op.cache.D;
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  for_rows(M, [&](int64_t m) {
    const int64_t b = sequence_of(row_start, m), length = op.cache.lengths.as<int32_t>()[b];
    const int64_t position = length + op.depths.as<int32_t>()[m], slot = length + m - row_start[b];
    const float* cos = op.cos.as<float>() + position * (D / 2);
    const float* sin = op.sin.as<float>() + position * (D / 2);
    const float* q_norm = op.q_norm.defined() ? op.q_norm.as<float>() : nullptr;
    const float* k_norm = op.k_norm.defined() ? op.k_norm.as<float>() : nullptr;
    const float* row = op.qkv.as<float>() + m * (H + 2 * K) * D;
    for (int64_t h = 0; h < H; ++h) {
      rotate(row + h * D, q_norm, op.eps, cos, sin, D, op.q.as<float>() + (m * H + h) * D);
    }
    for (int64_t h = 0; h < K; ++h) {
      const int64_t offset = op.cache.offset(b, slot, h);
      rotate(row + (H + h) * D, k_norm, op.eps, cos, sin, D, op.cache.k.as<Cache>() + offset);
      const float* v = row + (H + K + h) * D;
      for (int64_t i = 0; i < D; ++i) store1(op.cache.v.as<Cache>() + offset + i, v[i]);
    }
  });
}

}  // namespace

void run(const RmsNorm& op) {
  const int64_t C = op.residual.shape[1];
  const float* weight = op.weight.as<float>();
  for_rows(op.residual.shape[0], [&](int64_t m) {
    float* x = op.residual.as<float>() + m * C;
    if (op.delta.defined()) {
      const float* delta = op.delta.as<float>() + m * C;
      for (int64_t c = 0; c < C; ++c) x[c] += delta[c];
    }
    const float scale = inverse_rms(x, C, op.eps);
    fill_activation(op.out, m, C, [&](float* out) {
      for (int64_t c = 0; c < C; ++c) out[c] = x[c] * scale * weight[c];
    });
  });
}

void run(const SiluMul& op) {
  const int64_t I = op.gate_up.shape[1] / 2;
  for_rows(op.gate_up.shape[0], [&](int64_t m) {
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

void run(const QuantiseRows& op) {
  const int64_t C = op.x.shape[1];
  for_rows(op.x.shape[0],
           [&](int64_t m) { quantise_row(op.x.as<float>() + m * C, C, op.out.as<RowBlock>() + m * op.out.shape[1]); });
}

void run(const RopeCache& op) {
  op.cache.validate_rows(op.q.shape[0]);
  check_depths(op.cache, op.depths, op.cos.shape[0]);
  switch (op.cache.k.dtype) {
    case DType::kFloat32:
      return rope_cache<float>(op);
    case DType::kBFloat16:
      return rope_cache<bfloat16>(op);
    default:
      return rope_cache<half>(op);
  }
}

}  // namespace specengine::SPECENGINE_ISA
