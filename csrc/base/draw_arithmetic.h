// The arithmetic of a draw, shared by CPU and CUDA so that both draw the same token: all sums are of integers, so their
// order does not matter, and only a multiply-add written as one is fused.
#pragma once
#include <cmath>
#include <cstdint>

#include "base/philox.h"

namespace specengine {

constexpr int32_t kNoToken = -1;
constexpr int64_t kNoiseBlock = 64;  // tokens that share one number of the first level of noise

// A product that no compiler fuses with a later sum.
template <typename Float>
SPECENGINE_HOST_DEVICE Float product(Float a, Float b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(Float) == sizeof(float)) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#else
  return a * b;
#endif
}

// The count that penalties use: 0 for a token that has not occurred, else the number of times it was output, plus kSeen
// if it is in the prompt.
constexpr int32_t kSeen = 1 << 30;

struct Penalties {
  float repetition, presence, frequency;

  SPECENGINE_HOST_DEVICE bool any() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }

  // The score of a token that has occurred.
  SPECENGINE_HOST_DEVICE float apply(float score, int32_t count) const {
    const int32_t outputs = count & ~kSeen;
    score = score > 0 ? score / repetition : product(score, repetition);
    return score - (product(frequency, static_cast<float>(outputs)) + (outputs > 0 ? presence : 0.0f));
  }
};

// Order-preserving bits: a larger float has a larger key, and -0 that of 0.
SPECENGINE_HOST_DEVICE inline uint32_t key_of(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
SPECENGINE_HOST_DEVICE inline float score_of(uint32_t key) {
  return __builtin_bit_cast(float, key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// A weight of 0 to 1 in units of 2^-40.
SPECENGINE_HOST_DEVICE inline uint64_t fixed_point(float weight) { return static_cast<uint64_t>(weight * 0x1p40f); }

// The weight that top-p keeps.
SPECENGINE_HOST_DEVICE inline uint64_t enough(float top_p, uint64_t total) {
  return static_cast<uint64_t>(std::ceil(static_cast<double>(top_p) * static_cast<double>(total)));
}

// A number above 0 and below 1.
SPECENGINE_HOST_DEVICE inline double uniform(uint64_t seed, uint32_t position, uint32_t index, NoiseStream stream,
                                             uint32_t salt = 0) {
  return (random_bits(seed, position, index, stream, salt) + 0.5) * 0x1p-32;
}
SPECENGINE_HOST_DEVICE inline double gumbel(uint64_t seed, uint32_t position, uint32_t index, NoiseStream stream,
                                            uint32_t salt = 0) {
  return -std::log(-std::log(uniform(seed, position, index, stream, salt)));
}

// A draw has two levels: first a block of 64 tokens, by its total weight, then a token inside it. The largest value
// wins, the first of equals. By the chain rule this is exact, with V/64 + 64 random numbers instead of V.
// highest: the block's best score; total: sum over the block of fixed_point(exp(score - highest)).
SPECENGINE_HOST_DEVICE inline double block_value(float highest, uint64_t total, uint64_t seed, uint32_t position,
                                                 uint32_t block) {
  return highest + std::log(static_cast<double>(total) * 0x1p-40) + gumbel(seed, position, block, NoiseStream::kBlock);
}
SPECENGINE_HOST_DEVICE inline double token_value(float score, uint64_t seed, uint32_t position, uint32_t token) {
  return score + gumbel(seed, position, token, NoiseStream::kToken);
}

}  // namespace specengine
