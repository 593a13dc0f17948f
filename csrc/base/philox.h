// Philox4x32-10 (Salmon et al., SC'11) as a pure function of (seed, position, index, stream): the only source of random
// numbers. CPU, CUDA and the Python reference get equal numbers, so a seed fixes the text on all of them.
#pragma once
#include <cstdint>

#include "base/host_device.h"

namespace specengine {

// Streams salt the counter: draws for different purposes must be independent, else the output is biased.
enum class NoiseStream : uint32_t { kBlock = 0, kToken = 1, kAccept = 2, kDraftBlock = 3, kDraftToken = 4 };

struct Philox4 {
  uint32_t v[4];
};

SPECENGINE_HOST_DEVICE inline Philox4 philox4x32(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c0 = n0, c1 = static_cast<uint32_t>(b), c2 = n2, c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// 32 random bits for entry `index` of the token at absolute position `position`. salt: numbers several draws
// at one position.
SPECENGINE_HOST_DEVICE inline uint32_t random_bits(uint64_t seed, uint32_t position, uint32_t index, NoiseStream stream,
                                                   uint32_t salt = 0) {
  const Philox4 four = philox4x32(seed, index >> 2, position, static_cast<uint32_t>(stream), salt);
  const uint32_t low = index & 1 ? four.v[1] : four.v[0], high = index & 1 ? four.v[3] : four.v[2];
  return index & 2 ? high : low;  // indexing v by a variable would send it to memory
}

}  // namespace specengine
