// One task owns one row (node) and a run of query heads that share a key/value head. Keys are walked in the order of
// their *positions* in blocks of 64 positions: the prefix first, then the node's path, gathered from where its nodes
// lie in the cache. So a node reduces exactly as the same token does in plain decoding or in prefill: equal bits
// whatever the tree, the batch or the number of threads.
#include "ops/tree_attention.h"

#include "cpu/simd.h"

namespace specengine::SPECENGINE_ISA {
namespace {

constexpr int kBlock = 64;

// Cache slots of the positions one row sees: slot = position in the prefix, else prefix length + node index.
struct Path {
  int64_t length;  // of the prefix
  int64_t depth;   // of the row's node
  bool chain;
  uint8_t nodes[kMaxNodes];  // node index by depth, trees only

  int64_t slot(int64_t position) const {
    if (position < length || chain) return position;
    return length + nodes[position - length];
  }
};

inline f32x8 load_up_to8(const float* p, int64_t count) {
  if (count >= kLanes) return load8(p);
  float padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = p[i];
  return load8(padded);
}
inline f32x8 load_up_to8(const bfloat16* p, int64_t count) {
  if (count >= kLanes) return load8(p);
  float padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = load1(p + i);
  return load8(padded);
}

// Eight dot products at a time; each is eight lanes over D, then the fixed tree of sum8.
template <typename Cache>
f32x8 dot8(const float* q, const Cache* const* keys, int64_t dim) {
  f32x8 sum[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const f32x8 x = load_up_to8(q + d, dim - d);
    for (int i = 0; i < kLanes; ++i) sum[i] = fmadd(x, load_up_to8(keys[i] + d, dim - d), sum[i]);
  }
  f32x8 dots;
  for (int i = 0; i < kLanes; ++i) dots[i] = sum8(sum[i]);
  return dots;
}

// out[D] = out * rescale + sum over keys of weight * value, keys in order.
template <typename Cache>
void accumulate(float* out, float rescale, const float* weights, const Cache* const* values, int count, int64_t dim) {
  constexpr int kVectors = 8;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes) {
    f32x8 sum[kVectors];
    for (int i = 0; i < kVectors; ++i) sum[i] = load8(out + d + i * kLanes) * splat(rescale);
    for (int k = 0; k < count; ++k) {
      const f32x8 w = splat(weights[k]);
      for (int i = 0; i < kVectors; ++i) sum[i] = fmadd(w, load8(values[k] + d + i * kLanes), sum[i]);
    }
    for (int i = 0; i < kVectors; ++i) store8(out + d + i * kLanes, sum[i]);
  }
  for (; d < dim; ++d) {
    float sum = out[d] * rescale;
    for (int k = 0; k < count; ++k) sum = fmadd(weights[k], load1(values[k] + d), sum);
    out[d] = sum;
  }
}

template <typename Cache>
void attend(const TreeAttention& op, int64_t row, int64_t b, const Path& path, int64_t first_head, int64_t heads) {
  const int64_t H = op.q.shape[1], D = op.q.shape[2], kv_head = first_head / (H / op.cache.K);
  const int64_t position = path.length + path.depth;
  const int64_t first = op.window > 0 ? std::max<int64_t>(0, position - op.window + 1) : 0;
  const float* q = op.q.as<float>() + (row * H + first_head) * D;
  float* out = op.out.as<float>() + (row * H + first_head) * D;
  float highest[TreeAttention::kMaxGroup], total[TreeAttention::kMaxGroup];
  for (int64_t h = 0; h < heads; ++h) highest[h] = -INFINITY, total[h] = 0;
  std::memset(out, 0, heads * D * sizeof(float));

  for (int64_t block = first / kBlock * kBlock; block <= position; block += kBlock) {
    const Cache *keys[kBlock], *values[kBlock];
    int count = 0;
    for (int64_t p = std::max(first, block); p <= std::min(position, block + kBlock - 1); ++p, ++count) {
      const int64_t offset = op.cache.offset(b, path.slot(p), kv_head);
      keys[count] = op.cache.k.as<Cache>() + offset;
      values[count] = op.cache.v.as<Cache>() + offset;
    }
    const int padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int i = count; i < padded; ++i) keys[i] = keys[count - 1];
    for (int64_t h = 0; h < heads; ++h) {
      float scores[kBlock];
      float top = highest[h];
      for (int i = 0; i < padded; i += kLanes) {
        store8(scores + i, dot8(q + h * D, keys + i, D) * splat(op.scale));
      }
      for (int i = 0; i < count; ++i) top = scores[i] > top ? scores[i] : top;
      for (int i = count; i < padded; ++i) scores[i] = -INFINITY;
      f32x8 sum = {};
      for (int i = 0; i < padded; i += kLanes) {
        const f32x8 weight = exp8(load8(scores + i) - splat(top));
        store8(scores + i, weight);
        sum = sum + weight;
      }
      const float rescale = exp1(highest[h] - top);
      total[h] = fmadd(total[h], rescale, sum8(sum));
      highest[h] = top;
      accumulate(out + h * D, rescale, scores, values, count, D);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float inverse = 1.0f / total[h];
    for (int64_t d = 0; d < D; ++d) out[h * D + d] *= inverse;
  }
}

Path path_of(const TreeAttention& op, int64_t row, int64_t b) {
  const int64_t node = row - op.cache.row_start.as<int32_t>()[b];
  Path path{op.cache.lengths.as<int32_t>()[b], node, !op.ancestors.defined(), {}};
  if (path.chain) return path;
  const int64_t words = op.ancestors.shape[1];
  int64_t count = 0;
  for (int64_t w = 0; w < words; ++w) {
    for (uint32_t bits = op.ancestors.as<uint32_t>()[row * words + w]; bits != 0; bits &= bits - 1) {
      path.nodes[count++] = static_cast<uint8_t>(32 * w + __builtin_ctz(bits));
    }
  }
  path.depth = count - 1;
  return path;
}

void check_ancestors(const TreeAttention& op) {
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  const int64_t words = op.ancestors.shape[1];
  for (int64_t b = 0; b < op.cache.B; ++b) {
    const int64_t nodes = row_start[b + 1] - row_start[b];
    if (nodes > kMaxNodes)
      fail("row_start: sequence ", b, " has ", nodes, " nodes, at most ", kMaxNodes, " are supported");
    if (nodes > 32 * words) fail("ancestors: ", words, " words cannot hold the ", nodes, " nodes of sequence ", b);
    for (int64_t node = 0; node < nodes; ++node) {
      const uint32_t* bits = op.ancestors.as<uint32_t>() + (row_start[b] + node) * words;
      const bool sees_root = bits[0] & 1, sees_itself = bits[node / 32] >> (node % 32) & 1;
      bool sees_later = (static_cast<uint64_t>(bits[node / 32]) >> (node % 32)) > 1;
      for (int64_t w = node / 32 + 1; w < words; ++w) sees_later = sees_later || bits[w] != 0;
      if (!sees_root || !sees_itself || sees_later) {
        fail("ancestors: row ", row_start[b] + node, " (node ", node, " of sequence ", b,
             ") must contain the root and itself, and no later node");
      }
    }
  }
}

template <typename Cache>
void tree_attention(const TreeAttention& op) {
  const int64_t M = op.q.shape[0], H = op.q.shape[1], group = H / op.cache.K;
  // Heads of a group share their keys through the cache; with few rows every head is a task of its own instead.
  const int64_t heads = M * op.cache.K >= 4 * num_threads() ? group : 1, runs = H / heads;
  parallel_for(M * runs, [&](int64_t task) {
    const int64_t row = task / runs, b = sequence_of(op.cache.row_start.as<int32_t>(), row);
    attend<Cache>(op, row, b, path_of(op, row, b), task % runs * heads, heads);
  });
}

}  // namespace

void run(const TreeAttention& op) {
  op.cache.validate_rows(op.q.shape[0]);
  if (op.ancestors.defined()) check_ancestors(op);
  op.cache.k.dtype == DType::kFloat32 ? tree_attention<float>(op) : tree_attention<bfloat16>(op);
}

}  // namespace specengine::SPECENGINE_ISA
