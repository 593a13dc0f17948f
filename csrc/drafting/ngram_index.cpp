#include "drafting/ngram_index.h"

namespace specengine {

namespace {

constexpr int32_t kLongestNgram = 32;

}  // namespace

NgramIndex::NgramIndex(int32_t min_ngram, int32_t max_ngram) : least_(min_ngram) {
  if (min_ngram < 1 || max_ngram < min_ngram || max_ngram > kLongestNgram) {
    fail("min_ngram: expected 1 <= min_ngram <= max_ngram <= ", kLongestNgram, ", got ", min_ngram, " and ", max_ngram);
  }
  lengths_.resize(max_ngram - min_ngram + 1);
  for (Length& length : lengths_) length = {std::vector<int32_t>(64, 0), {0}};
}

// The n-grams before the last token are indexed: the last token has no continuation yet.
void NgramIndex::append(int32_t token) {
  if (text_.size() >= size_t{1} << 30) fail("token: the index is full with ", text_.size(), " tokens");
  text_.push_back(token);
  if (text_.size() > 1) index(static_cast<int32_t>(text_.size()) - 1);
}

void NgramIndex::index(int32_t end) {
  for (size_t i = 0; i < lengths_.size(); ++i) {
    Length& length = lengths_[i];
    const int32_t n = least_ + static_cast<int32_t>(i);
    if (n > end) {
      length.earlier.push_back(0);
      continue;
    }
    if (2 * (length.used + 1) > static_cast<int32_t>(length.newest.size())) grow(length, n);
    int32_t& newest = length.newest[slot(length, n, end, hash(n, end))];
    length.used += newest == 0;
    length.earlier.push_back(newest);
    newest = end;
  }
}

uint64_t NgramIndex::hash(int32_t n, int32_t end) const {
  uint64_t key = 0;
  for (int32_t i = end - n; i < end; ++i) key = (key ^ static_cast<uint32_t>(text_[i])) * 0x9E3779B97F4A7C15u;
  return key ^ key >> 32;
}

// The place of the n-gram before `end`, or the free place where it belongs.
size_t NgramIndex::slot(const Length& length, int32_t n, int32_t end, uint64_t hash) const {
  const int32_t* string = text_.data() + end - n;
  size_t place = hash & (length.newest.size() - 1);
  while (length.newest[place] != 0 && !std::equal(string, string + n, text_.data() + length.newest[place] - n)) {
    place = (place + 1) & (length.newest.size() - 1);
  }
  return place;
}

void NgramIndex::grow(Length& length, int32_t n) const {
  const std::vector<int32_t> before = std::move(length.newest);
  length.newest.assign(2 * before.size(), 0);
  for (const int32_t end : before) {
    if (end != 0) length.newest[slot(length, n, end, hash(n, end))] = end;
  }
}

Continuations NgramIndex::draft(int32_t most, int32_t nodes, int32_t deepest, std::span<const double> rates,
                                double least) {
  if (text_.empty()) fail("tokens: expected at least one");
  check_rates(rates, kLookupKinds);
  drafted_ = matches(most);
  return grow_tree(*this, text_.back(), drafted_, nodes, deepest, 0, rates, least);
}

std::vector<std::pair<int32_t, bool>> NgramIndex::judge(std::span<const int32_t> committed) const {
  std::vector<std::pair<int32_t, bool>> judged;
  std::vector<Branch<Match>> following;
  Match match = drafted_;
  for (const int32_t token : committed) {
    following.clear();
    branches(match, 0, following);
    match.clear();
    for (Branch<Match>& branch : following) {
      judged.emplace_back(branch.kind, branch.token == token);
      if (branch.token == token) match = std::move(branch.match);
    }
  }
  return judged;
}

// Where the text's last tokens occurred before. An end that n-grams of several lengths share counts once.
NgramIndex::Match NgramIndex::matches(int32_t most) const {
  Match found;
  const int32_t count = static_cast<int32_t>(text_.size());
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const int32_t n = least_ + static_cast<int32_t>(i);
    if (n > count) break;
    int32_t end = lengths_[i].newest[slot(lengths_[i], n, count, hash(n, count))];
    for (int32_t looked = 0; looked < most && end != 0; ++looked, end = lengths_[i].earlier[end]) {
      int32_t length = n;
      while (length < std::min(kLongestMatch, end) && text_[end - length - 1] == text_[count - length - 1]) ++length;
      found.push_back({end, length});
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Occurrence& a, const Occurrence& b) { return a.end > b.end; });
  const auto same = [](const Occurrence& a, const Occurrence& b) { return a.end == b.end; };
  found.erase(std::unique(found.begin(), found.end(), same), found.end());
  std::stable_sort(found.begin(), found.end(),
                   [](const Occurrence& a, const Occurrence& b) { return a.length > b.length; });
  return found;
}

void NgramIndex::branches(const Match& match, int32_t, std::vector<Branch<Match>>& out) const {
  for (const auto& [end, length] : match) {
    if (end >= size()) continue;
    const int32_t token = text_[end];
    auto branch = std::find_if(out.begin(), out.end(), [&](const Branch<Match>& each) { return each.token == token; });
    if (branch == out.end()) {
      const int32_t bits = std::bit_width(static_cast<uint32_t>(std::min(kLongestMatch, length)));
      branch = out.insert(out.end(), {token, 2 * (bits - 1) + !out.empty(), {}});
    }
    branch->match.push_back({end + 1, length + 1});
  }
}

}  // namespace specengine
