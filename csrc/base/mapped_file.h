#pragma once
#include <cstdint>

namespace specengine {

// A file mapped to memory, which the process may read at once and in large pages later. Writes stay in the process.
class MappedFile {
 public:
  // descriptor: of a file of at least `size` bytes. Throws std::bad_alloc where it cannot be mapped.
  MappedFile(int descriptor, int64_t size);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

  // Copies a piece of the bytes into large pages and puts these in the place of the file's, while other threads may
  // read but not write them; returns the first byte behind the piece. Elsewhere than on Linux, and without memory for
  // them, the file stays mapped. begin: 0 or an earlier result; throws std::invalid_argument for others.
  int64_t use_large_pages(int64_t begin);

 private:
  void* reserved_;
  int64_t reserved_bytes_;
  uint8_t* data_;
  int64_t size_;
};

}  // namespace specengine
