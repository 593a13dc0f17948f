// Phrases of one length by the token they followed (Ouroboros, Zhao et al. 2024; lookahead decoding's n-gram pool).
#pragma once
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <vector>

namespace specengine {

// At most `width` phrases of `length` tokens behind each of at most `keys` tokens: what was put in last stays, reading
// refreshes nothing. Every call takes a time that depends on these three sizes only.
class PhrasePool {
 public:
  using Phrase = std::span<const int32_t>;

  PhrasePool(int32_t length, int32_t width, int32_t keys);

  // Becomes the newest phrase of its token, also where it was known before.
  void insert(int32_t token, Phrase phrase);
  // Takes the place, and with it the age, of another phrase where that is still there. Of two equal ones, which this
  // may make, the older goes.
  void replace(int32_t token, Phrase before, Phrase after);
  // The newest phrases of a token, at most so many, the oldest of them first.
  std::vector<std::vector<int32_t>> newest(int32_t token, int32_t most) const;
  // Every token that has phrases; the one whose last insertion is the longest ago first.
  std::vector<int32_t> tokens() const;

  int32_t length() const { return length_; }
  int32_t width() const { return width_; }
  int32_t keys() const { return keys_; }
  int64_t size() const { return size_; }  // phrases
  // Of memory when it is full, which it never exceeds.
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
