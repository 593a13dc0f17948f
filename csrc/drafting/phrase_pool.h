// Phrases of one length by the token they followed (Ouroboros, Zhao et al. 2024; lookahead decoding's n-gram pool).
#pragma once
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

namespace specengine {

// At most `width` phrases of `length` tokens behind each of at most `keys` tokens. The oldest insertion is evicted;
// reading does not refresh. The time of a call depends on these three sizes only.
class PhrasePool {
 public:
  using Phrase = std::span<const int32_t>;

  PhrasePool(int32_t length, int32_t width, int32_t keys);

  // Makes the phrase the newest of its token, even if the pool had it before.
  void insert(int32_t token, Phrase phrase);
  // Replaces phrase `before`, if it is still there; `after` takes its age. If the token then has the phrase twice, the
  // older one is dropped.
  void replace(int32_t token, Phrase before, Phrase after);
  // The newest phrases of a token, at most `most`, the oldest of them first.
  std::vector<std::vector<int32_t>> newest(int32_t token, int32_t most) const;
  // Every token that has phrases, in the order of their last insertions, oldest first.
  std::vector<int32_t> tokens() const;

  int32_t length() const { return length_; }
  int32_t width() const { return width_; }
  int32_t keys() const { return keys_; }
  int64_t size() const { return size_; }  // phrases
  // Bytes of a full pool.
  int64_t most_bytes() const;

 private:
  struct Entry {
    std::vector<int32_t> phrases;  // oldest first
    std::list<int32_t>::iterator turn;
  };

  void check(Phrase phrase) const;
  int32_t find(const Entry& entry, Phrase phrase) const;  // -1: not there
  void erase(Entry& entry, int32_t index);

  int32_t length_, width_, keys_;
  int64_t size_ = 0;
  std::list<int32_t> turns_;  // tokens, by their last insertion
  std::unordered_map<int32_t, Entry> entries_;
};

}  // namespace specengine
