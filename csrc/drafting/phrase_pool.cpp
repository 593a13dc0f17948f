#include "drafting/phrase_pool.h"

#include <algorithm>

#include "base/check.h"

namespace specengine {

namespace {

constexpr int64_t kMost = 1 << 16;  // tokens of all phrases behind one token: a call reads them all

}  // namespace

PhrasePool::PhrasePool(int32_t length, int32_t width, int32_t keys) : length_(length), width_(width), keys_(keys) {
  if (length < 1) fail("length: expected at least 1, got ", length);
  if (width < 1) fail("width: expected at least 1, got ", width);
  if (keys < 1) fail("keys: expected at least 1, got ", keys);
  if (static_cast<int64_t>(length) * width > kMost)
    fail("width: ", width, " phrases of ", length, " tokens are too many");
}

void PhrasePool::insert(int32_t token, Phrase phrase) {
  check(phrase);
  const auto [place, fresh] = entries_.try_emplace(token);
  Entry& entry = place->second;
  if (fresh) {
    entry.phrases.reserve(static_cast<size_t>(width_) * length_);  // never more: no reallocation later
    entry.turn = turns_.insert(turns_.end(), token);
  } else {
    turns_.splice(turns_.end(), turns_, entry.turn);
  }
  const int32_t known = find(entry, phrase);
  if (known >= 0) {
    erase(entry, known);
  } else if (static_cast<int32_t>(entry.phrases.size()) == width_ * length_) {
    erase(entry, 0);
  }
  entry.phrases.insert(entry.phrases.end(), phrase.begin(), phrase.end());
  ++size_;
  if (static_cast<int32_t>(entries_.size()) > keys_) {
    const auto oldest = entries_.find(turns_.front());
    size_ -= static_cast<int64_t>(oldest->second.phrases.size()) / length_;
    entries_.erase(oldest);
    turns_.pop_front();
  }
}

void PhrasePool::replace(int32_t token, Phrase before, Phrase after) {
  check(before);
  check(after);
  const auto place = entries_.find(token);
  if (place == entries_.end()) return;
  Entry& entry = place->second;
  const int32_t old = find(entry, before);
  if (old < 0) return;
  const int32_t known = find(entry, after);
  std::copy(after.begin(), after.end(), entry.phrases.begin() + old * length_);
  if (known >= 0 && known != old) erase(entry, std::min(known, old));
}

std::vector<std::vector<int32_t>> PhrasePool::newest(int32_t token, int32_t most) const {
  std::vector<std::vector<int32_t>> out;
  const auto place = entries_.find(token);
  if (place == entries_.end()) return out;
  const std::vector<int32_t>& phrases = place->second.phrases;
  const int32_t count = static_cast<int32_t>(phrases.size()) / length_;
  for (int32_t i = std::max(0, count - std::max(0, most)); i < count; ++i) {
    const auto first = phrases.begin() + i * length_;
    out.emplace_back(first, first + length_);
  }
  return out;
}

std::vector<int32_t> PhrasePool::tokens() const { return {turns_.begin(), turns_.end()}; }

int64_t PhrasePool::most_bytes() const {
  // a hash node, a list node and a vector's block, each with the allocator's overhead, and the table of the hash
  constexpr int64_t kOfKey = sizeof(std::pair<const int32_t, Entry>) + 16 + 32 + 3 * 16 + 2 * sizeof(void*);
  return keys_ * (kOfKey + static_cast<int64_t>(width_) * length_ * static_cast<int64_t>(sizeof(int32_t)));
}

void PhrasePool::check(Phrase phrase) const {
  if (static_cast<int32_t>(phrase.size()) != length_) {
    fail("phrase: expected ", length_, " tokens, got ", phrase.size());
  }
}

int32_t PhrasePool::find(const Entry& entry, Phrase phrase) const {
  const int32_t count = static_cast<int32_t>(entry.phrases.size()) / length_;
  for (int32_t i = 0; i < count; ++i) {
    if (std::equal(phrase.begin(), phrase.end(), entry.phrases.begin() + i * length_)) return i;
  }
  return -1;
}

void PhrasePool::erase(Entry& entry, int32_t index) {
  const auto first = entry.phrases.begin() + index * length_;
  entry.phrases.erase(first, first + length_);
  --size_;
}

}  // namespace specengine
