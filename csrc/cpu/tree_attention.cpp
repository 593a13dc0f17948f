// One task owns a tile of rows (nodes) of one request and query heads that share a key/value head. It walks the cache
// in blocks of 64 slots, one page of that head each, and shares every key and value among its (row, head) pairs.
//
// A row reduces in the order of its *positions*, in blocks of 64. In the prefix and in chains a position is a slot; a
// tree's scores are kept by slot until each row gathers those of its path. So a node gets the bits that the same token
// gets in plain decoding or in prefill, for every tree, batch and number of threads.
//
// The op allocates the list of tiles, and each thread a scratch that grows with the largest tile.
#include "ops/tree_attention.h"

#include <vector>

#include "cpu/attention_block.h"
#include "cpu/parallel_for.h"

namespace specengine::SPECENGINE_ISA {
namespace {

static_assert(kBlockSize == kPageSize);
constexpr int kTaskPairs = 48;                        // share a block of the cache while it is near
constexpr int kGatherSlots = kMaxNodes + kBlockSize;  // from the block in which a tree's nodes begin

// Rows of one request and query heads of one group. Pair p is row p / heads with head p % heads.
struct Tile {
  int64_t b, first_row, rows, kv_head, first_head, heads;
};

struct Seen {  // part of a block's 64 positions
  int begin, end;
};

template <typename Cache>
class Attention {
 public:
  Attention(const TreeAttention& op, const Tile& tile, std::vector<float>& scratch)
      : op_(op), tile_(tile), dim_(op.q.shape[2]), pairs_(static_cast<int>(tile.rows * tile.heads)) {
    const int64_t H = op.q.shape[1], start = op.cache.row_start.as<int32_t>()[tile.b];
    length_ = op.cache.lengths.as<int32_t>()[tile.b];
    first_node_ = op.cache.first_node + tile.first_row - start;
    slots_ = length_ + first_node_ + tile.rows;  // the most that a row of the tile sees
    chain_ = !op.ancestors.defined() || slots_ == length_ + 1;
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t depth = chain_ ? first_node_ + row : depth_of(tile.first_row + row);
      last_[row] = length_ + depth;
      first_[row] = op.window > 0 ? std::max<int64_t>(0, last_[row] - op.window + 1) : 0;
    }
    for (int p = 0; p < pairs_; ++p) {
      const int64_t offset = ((tile.first_row + p / tile.heads) * H + tile.first_head + p % tile.heads) * dim_;
      q_[p] = op.q.as<float>() + offset;
      out_[p] = op.out.as<float>() + offset;
      // A sink is a score before all positions, whose value is 0.
      const bool sinks = op.sinks.defined();
      highest_[p] = sinks ? op.sinks.as<float>()[tile.first_head + p % tile.heads] : -INFINITY;
      total_[p] = sinks ? 1.0f : 0.0f;
      std::memset(out_[p], 0, dim_ * sizeof(float));
    }
    const int64_t keys = dim_ * kBlockSize, gathered = chain_ ? 0 : pairs_ * kGatherSlots;
    if (static_cast<int64_t>(scratch.size()) < keys + gathered) scratch.resize(keys + gathered);
    keys_ = scratch.data(), by_slot_ = keys_ + keys;
  }

  void run() {
    const int64_t first = *std::min_element(first_, first_ + tile_.rows) / kBlockSize * kBlockSize;
    const int64_t gather = chain_ ? slots_ : length_ / kBlockSize * kBlockSize;  // slots before it are positions
    for (int64_t block = first; block < slots_; block += kBlockSize) {
      const int64_t offset = op_.cache.offset(tile_.b, block, tile_.kv_head);
      const Cache* keys = op_.cache.k_cache.template as<Cache>() + offset;
      const int count = static_cast<int>(std::min<int64_t>(kBlockSize, slots_ - block));
      fetch(op_.cache.v_cache.template as<Cache>() + offset, count);
      if (const int64_t next = block + kBlockSize; next < slots_) {
        const Cache* next_keys =
            op_.cache.k_cache.template as<Cache>() + op_.cache.offset(tile_.b, next, tile_.kv_head);
        fetch(next_keys, std::min<int64_t>(kBlockSize, slots_ - next));
      }
      transpose(keys, count, dim_, keys_);
      if (block < gather) {
        const Cache* values[kBlockSize];
        for (int i = 0; i < kBlockSize; ++i) values[i] = op_.cache.v_cache.template as<Cache>() + offset + i * dim_;
        consume_block(block, values);
      } else {
        for_runs(0, pairs_,
                 [&](int p, int n) { score(p, n, count, by_slot_ + p * kGatherSlots + block - gather, kGatherSlots); });
      }
    }
    if (!chain_) {
      for (int64_t row = 0; row < tile_.rows; ++row) gather_path(row, gather);
    }
    for (int p = 0; p < pairs_; ++p) {
      const float inverse = 1.0f / total_[p];
      for (int64_t d = 0; d < dim_; ++d) out_[p][d] *= inverse;
    }
  }

 private:
  // In a pass of few rows the weights have pushed the key/value cache out of the processor's caches.
  void fetch(const Cache* slots, int64_t count) const {
    const char* bytes = reinterpret_cast<const char*>(slots);
    const int64_t size = count * dim_ * static_cast<int64_t>(sizeof(Cache));
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(bytes + i);
  }

  int64_t depth_of(int64_t row) const {
    const int64_t words = op_.ancestors.shape[1];
    int64_t nodes = 0;
    for (int64_t w = 0; w < words; ++w) nodes += __builtin_popcount(op_.ancestors.as<uint32_t>()[row * words + w]);
    return nodes - 1;
  }

  // Calls body(p, n) for runs of up to kRunPairs pairs, of nearly equal length.
  template <typename Body>
  static void for_runs(int first, int count, const Body& body) {
    const int runs = (count + kRunPairs - 1) / kRunPairs;
    for (int i = 0; i < runs; ++i) {
      const int begin = count * i / runs, end = count * (i + 1) / runs;
      body(first + begin, end - begin);
    }
  }

  Seen seen(int64_t row, int64_t block) const {
    const auto within = [&](int64_t p) { return static_cast<int>(std::clamp<int64_t>(p - block, 0, kBlockSize)); };
    return {within(first_[row]), within(last_[row] + 1)};
  }

  // Scores pairs [p, p + n) with the first `count` keys.
  void score(int p, int n, int count, float* scores, int64_t stride) const {
    with_count(n, [&](auto pairs) { score_block<pairs.value>(q_ + p, keys_, count, dim_, op_.scale, scores, stride); });
  }

  // Takes a block whose positions are slots.
  void consume_block(int64_t block, const Cache* const* values) {
    for_runs(0, pairs_, [&](int p, int n) {
      Seen range[kRunPairs];
      int count = 0;
      for (int r = 0; r < n; ++r) {
        range[r] = seen((p + r) / tile_.heads, block);
        count = std::max(count, range[r].begin < range[r].end ? range[r].end : 0);
      }
      if (count == 0) return;
      float scores[kRunPairs * kScores];
      score(p, n, count, scores, kScores);
      consume(p, n, scores, range, values);
    });
  }

  // Takes the positions of a row from `from` on: the rest of the prefix, then its path.
  void gather_path(int64_t row, int64_t from) {
    const int64_t words = op_.ancestors.shape[1];
    const uint32_t* bits = op_.ancestors.as<uint32_t>() + (tile_.first_row + row) * words;
    int slot[kGatherSlots];  // slot - from of position - from
    int positions = static_cast<int>(length_ - from);
    for (int i = 0; i < positions; ++i) slot[i] = i;
    for (int64_t w = 0, prefix = length_ - from; w < words; ++w) {
      for (uint32_t rest = bits[w]; rest != 0; rest &= rest - 1) {
        slot[positions++] = static_cast<int>(prefix + 32 * w + __builtin_ctz(rest));
      }
    }
    for (int64_t block = std::max(from, first_[row] / kBlockSize * kBlockSize); block <= last_[row];
         block += kBlockSize) {
      const Seen range = seen(row, block);
      const int* slots = slot + (block - from);
      const Cache* values[kBlockSize];
      for (int i = range.begin; i < range.end; ++i) {
        values[i] = op_.cache.v_cache.template as<Cache>() + op_.cache.offset(tile_.b, from + slots[i], tile_.kv_head);
      }
      for_runs(static_cast<int>(row * tile_.heads), static_cast<int>(tile_.heads), [&](int p, int n) {
        float scores[kRunPairs * kScores];
        Seen ranges[kRunPairs];
        for (int r = 0; r < n; ++r) {
          ranges[r] = range;
          const float* by_slot = by_slot_ + (p + r) * kGatherSlots;
          for (int i = range.begin; i < range.end; ++i) scores[r * kScores + i] = by_slot[slots[i]];
        }
        consume(p, n, scores, ranges, values);
      });
    }
  }

  // The online softmax: adds a block's values, weighted by its scores (overwritten), to the sums of n pairs. Reads only
  // scores and values that a row sees.
  void consume(int p, int n, float* scores, const Seen* seen, const Cache* const* values) {
    constexpr int kWidth = kLanesOf<Vector>;
    float change[kLanes] = {};
    for (int r = 0; r < n; ++r) {
      const int count = seen[r].end - seen[r].begin;
      if (count <= 0) continue;
      float* s = scores + r * kScores + seen[r].begin;
      f32x8 best = splat(highest_[p + r]);
      int padded = count;
      for (; padded % kWidth != 0; ++padded) s[padded] = -INFINITY;
      for (int i = 0; i < padded; i += kLanes) best = max8(load8(s + i), best);
      const float top = max_of(best);
      f32x8 sum = {};
      for (int i = 0; i < padded; i += kWidth) {
        store(s + i, exp_of(load<Vector>(s + i) - splat_of<Vector>(top)));
        for (int part = 0; part < kWidth; part += kLanes) sum = sum + load8(s + i + part);
      }
      change[r] = highest_[p + r] - top;
      sums_[r] = sum8(sum);
      highest_[p + r] = top;
    }
    float rescale[kLanes];
    store8(rescale, exp8(load8(change)));
    int begin = 0, end = kBlockSize;  // the positions that all pairs see
    for (int r = 0; r < n; ++r) {
      if (seen[r].begin < seen[r].end) total_[p + r] = fmadd(total_[p + r], rescale[r], sums_[r]);
      begin = std::max(begin, seen[r].begin), end = std::min(end, seen[r].end);
    }
    end = std::max(begin, end);
    const auto alone = [&](int r, int from, int to) {
      if (from >= to) return;
      accumulate<1>(out_ + p + r, rescale + r, scores + r * kScores, values, from, to, dim_);
      rescale[r] = 1;
    };
    for (int r = 0; r < n; ++r) alone(r, seen[r].begin, std::min(begin, seen[r].end));
    if (begin < end) {
      with_count(n, [&](auto pairs) {
        accumulate<pairs.value>(out_ + p, rescale, scores, values, begin, end, dim_);
        for (int r = 0; r < pairs; ++r) rescale[r] = 1;
      });
    }
    for (int r = 0; r < n; ++r) alone(r, std::max(end, seen[r].begin), seen[r].end);
  }

  const TreeAttention& op_;
  const Tile& tile_;
  int64_t dim_, length_, first_node_, slots_;
  int pairs_;
  bool chain_;
  int64_t first_[kTaskPairs], last_[kTaskPairs];  // positions that a row sees
  const float* q_[kTaskPairs];
  float* out_[kTaskPairs];
  float highest_[kTaskPairs], total_[kTaskPairs], sums_[kRunPairs];
  float* keys_;     // [D][64]
  float* by_slot_;  // [pairs][kGatherSlots]
};

// Tiles of nearly equal height. Few rows are cut finer, and their heads too, so that every thread has about two tasks.
std::vector<Tile> tiles_of(const TreeAttention& op) {
  const int64_t H = op.q.shape[1], group = H / op.cache.heads(), enough = num_threads() > 1 ? 2 * num_threads() : 1;
  const int32_t* row_start = op.cache.row_start.as<int32_t>();
  int64_t heads = std::min<int64_t>(group, kTaskPairs), height = kTaskPairs / heads;
  const auto tiles = [&](int64_t b) { return (row_start[b + 1] - row_start[b] + height - 1) / height; };
  const auto few = [&] {
    int64_t count = 0;
    for (int64_t b = 0; b < op.cache.requests(); ++b) count += tiles(b);
    return count * op.cache.heads() * ((group + heads - 1) / heads) < enough;
  };
  while (height > 1 && few()) height = (height + 1) / 2;
  while (heads > 1 && few()) heads = (heads + 1) / 2;
  std::vector<Tile> result;
  for (int64_t b = 0; b < op.cache.requests(); ++b) {
    const int64_t rows = row_start[b + 1] - row_start[b], count = tiles(b);
    for (int64_t head = 0, end = 0; head < H; head = end) {
      end = std::min(head + heads, (head / group + 1) * group);
      // The later rows of a chain see more: the longest tasks come first, so that none is left alone at the end.
      for (int64_t t = count - 1; t >= 0; --t) {
        const int64_t first = rows * t / count, last = rows * (t + 1) / count;
        result.push_back({b, row_start[b] + first, last - first, head / group, head, end - head});
      }
    }
  }
  return result;
}

template <typename Cache>
void tree_attention(const TreeAttention& op) {
  const std::vector<Tile> tiles = tiles_of(op);
  parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t task) {
    thread_local std::vector<float> scratch;
    Attention<Cache>(op, tiles[task], scratch).run();
  });
}

}  // namespace

void run(const TreeAttention& op) {
  if (op.out.dtype != DType::kFloat32) fail("out: expected dtype float32 on cpu, got ", name_of(op.out.dtype));
  op.cache.validate_rows(op.q.shape[0]);
  if (op.ancestors.defined()) check_ancestors(op.cache, op.ancestors);
  with_float_type(op.cache.k_cache.dtype, [&](auto zero) { tree_attention<decltype(zero)>(op); });
}

}  // namespace specengine::SPECENGINE_ISA
