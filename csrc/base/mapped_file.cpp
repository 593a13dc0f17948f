#include "base/mapped_file.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/check.h"

namespace specengine {
namespace {

constexpr int64_t kLargePage = 2 << 20;
constexpr int64_t kPiece = 32 << 20;  // moved at once: as much memory is taken twice meanwhile

int64_t round_up(int64_t size) { return (size + kLargePage - 1) / kLargePage * kLargePage; }

uint8_t* aligned(void* memory) {
  return reinterpret_cast<uint8_t*>(round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory))));
}

void* reserve(int64_t size, int protection) {
  return mmap(nullptr, static_cast<size_t>(size), protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

}  // namespace

MappedFile::MappedFile(int descriptor, int64_t size) : reserved_bytes_(round_up(size) + kLargePage), size_(size) {
  reserved_ = reserve(reserved_bytes_, PROT_NONE);
  if (reserved_ == MAP_FAILED) throw std::bad_alloc();
  data_ = aligned(reserved_);
  const int both = PROT_READ | PROT_WRITE;
  if (mmap(data_, static_cast<size_t>(size), both, MAP_PRIVATE | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    munmap(reserved_, static_cast<size_t>(reserved_bytes_));
    throw std::bad_alloc();
  }
}

MappedFile::~MappedFile() { munmap(reserved_, static_cast<size_t>(reserved_bytes_)); }

int64_t MappedFile::use_large_pages(int64_t begin) {
  if (begin < 0 || begin >= size_ || begin % kPiece != 0) {
    fail("begin: expected 0 or the end of a piece before byte ", size_, ", got ", begin);
  }
  const int64_t bytes = std::min(kPiece, size_ - begin);
#if defined(__linux__)
  const int64_t pages = round_up(bytes);
  void* room = reserve(pages + kLargePage, PROT_READ | PROT_WRITE);
  if (room == MAP_FAILED) return begin + bytes;
  uint8_t* copy = aligned(room);
  const auto before = static_cast<size_t>(copy - static_cast<uint8_t*>(room)), length = static_cast<size_t>(pages);
  madvise(copy, length, MADV_HUGEPAGE);  // fails without them: the pages are ordinary ones
  std::memcpy(copy, data_ + begin, static_cast<size_t>(bytes));
  // One step to the eyes of all threads: a read in between waits for the kernel's lock and finds the same bytes.
  if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + begin) == MAP_FAILED) munmap(copy, length);
  if (before > 0) munmap(room, before);
  munmap(copy + pages, static_cast<size_t>(kLargePage) - before);
#endif
  return begin + bytes;
}

}  // namespace specengine
