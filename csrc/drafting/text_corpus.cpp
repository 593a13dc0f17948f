#include "drafting/text_corpus.h"

#include <array>
#include <limits>
#include <numeric>

namespace specengine {

namespace {

constexpr int64_t kSamples = 32;  // occurrences that are read
constexpr uint16_t kNarrowEnd = 0xffff;

void check_corpus(const TensorView& tokens, const TensorView& order, std::initializer_list<DType> dtypes) {
  Checker check;
  Dim n{"n"};
  check(tokens, "tokens", dtypes, {n});
  check(order, "order", {DType::kInt32}, {n});
  if (check.device() != Device::kCpu) fail("tokens: expected a tensor on the CPU");
  if (n > std::numeric_limits<int32_t>::max()) fail("tokens: ", n.value, " are more than 32 bits can number");
}

}  // namespace

void sort_suffixes(const TensorView& tokens, const TensorView& order) {
  check_corpus(tokens, order, {DType::kInt32});
  const int32_t *text = tokens.as<int32_t>(), *end = text + tokens.shape[0];
  int32_t* places = order.as<int32_t>();
  std::iota(places, places + tokens.shape[0], 0);
  const auto string = [&](int32_t place) {
    return std::span(text + place, std::min<int64_t>(end - text - place, kMatched + kDeepest));
  };
  std::sort(places, places + tokens.shape[0], [&](int32_t a, int32_t b) {
    const auto one = string(a), other = string(b);
    const auto [x, y] = std::mismatch(one.begin(), one.end(), other.begin(), other.end());
    if (x == one.end() || y == other.end()) return one.size() != other.size() ? one.size() < other.size() : a < b;
    return *x < *y;
  });
}

TextCorpus::TextCorpus(const TensorView& tokens, const TensorView& order)
    : tokens_(tokens.dtype == DType::kInt32 ? tokens.as<int32_t>() : nullptr),
      narrow_(tokens.as<uint16_t>()),
      order_(order.as<int32_t>()),
      size_(tokens.shape[0]) {
  check_corpus(tokens, order, {DType::kInt32, DType::kUInt16});
}

int32_t TextCorpus::token_at(int64_t place, int32_t offset) const {
  const int64_t position = int64_t{order_[place]} + offset;
  if (position < 0 || position >= size_) return -1;
  if (tokens_) return tokens_[position];
  return narrow_[position] == kNarrowEnd ? -1 : narrow_[position];
}

// The first place for which `before` is false; all places for which it is true come first.
template <typename Before>
int64_t TextCorpus::first_not(int64_t begin, int64_t end, const Before& before) const {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (before(middle)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

TextCorpus::Match TextCorpus::range(std::span<const int32_t> string) const {
  const auto compared = [&](int64_t place) {  // below, equal or above 0 as the text there is to the string
    for (size_t i = 0; i < string.size(); ++i) {
      const int32_t token = token_at(place, static_cast<int32_t>(i));
      if (token != string[i]) return token < string[i] ? -1 : 1;
    }
    return 0;
  };
  const int64_t begin = first_not(0, size_, [&](int64_t place) { return compared(place) < 0; });
  // Most strings have few occurrences: their end is near. Far places lie in memory that no cache holds.
  int64_t end = begin, step = 1;
  while (end + step <= size_ && compared(end + step - 1) == 0) end += step, step *= 2;
  end = first_not(end, std::min(end + step, size_), [&](int64_t place) { return compared(place) <= 0; });
  return {begin, end, static_cast<int32_t>(string.size())};
}

TextCorpus::Match TextCorpus::longest_match(std::span<const int32_t> context) const {
  Match best{0, 0, 0};
  // A string's suffixes occur wherever it occurs, so the length is found by bisection, from a usual one on.
  constexpr size_t kUsual = 4;
  for (size_t least = 1, most = context.size(); least <= most;) {
    const size_t length = std::min((least + most) / 2, least < kUsual ? kUsual : 2 * least);
    const Match match = range(context.last(length));
    if (match.begin < match.end) {
      best = match, least = length + 1;
    } else {
      most = length - 1;
    }
  }
  return best;
}

void TextCorpus::branches(const Match& match, int32_t width, std::vector<Branch<Match>>& out) const {
  if (match.length == 0) return;
  struct Run {
    int32_t token;
    int64_t first, last, count;
  };
  std::array<Run, kSamples> runs;
  const int64_t samples = std::min(match.end - match.begin, kSamples);
  const auto place = [&](int64_t sample) { return match.begin + sample * (match.end - match.begin) / samples; };
  // All are read before any is looked at: they lie far apart, and memory answers many requests at once.
  std::array<int32_t, kSamples> read;
  for (int64_t sample = 0; sample < samples; ++sample) read[sample] = token_at(place(sample), match.length);
  int64_t used = 0, all = 0;
  for (int64_t sample = 0; sample < samples; ++sample) {
    const int32_t token = read[sample];
    if (token < 0) continue;
    ++all;
    if (used > 0 && runs[used - 1].token == token) {
      runs[used - 1].last = sample, ++runs[used - 1].count;
    } else {
      runs[used++] = {token, sample, sample, 1};
    }
  }
  const auto end = runs.begin() + used;
  std::stable_sort(runs.begin(), end, [](const Run& a, const Run& b) { return a.count > b.count; });
  for (auto run = runs.begin(); run != end && run - runs.begin() < width; ++run) {
    const auto token = [&](int64_t at) { return token_at(at, match.length); };
    const int64_t before = run->first == 0 ? match.begin : place(run->first - 1) + 1;
    const int64_t behind = run->last == samples - 1 ? match.end : place(run->last + 1);
    const Match longer{first_not(before, place(run->first), [&](int64_t at) { return token(at) < run->token; }),
                       first_not(place(run->last) + 1, behind, [&](int64_t at) { return token(at) <= run->token; }),
                       match.length + 1};
    out.push_back({run->token, kind_of(match.length, run->count, all, run == runs.begin()), longer});
  }
}

}  // namespace specengine
