// Parts of the messages.
#pragma once
#include <cstring>
#include <source_location>
#include <string>

#include "sim/types.h"

namespace specengine::sim {

// The place of an action: a line of the source, or an instruction, whose line is looked up on demand.
struct Site {
  Site(const std::source_location& where) : where(&where) {}
  Site(const void* instruction) : instruction(instruction) {}
  const std::source_location* where = nullptr;
  const void* instruction = nullptr;
};

std::string text_of(uint3 index);
std::string text_of(const std::source_location& where);
std::string text_of_mask(unsigned lanes);
// " at file:line", with the lines it was inlined to; empty if the machine has no addr2line.
std::string text_of(const Site& site);

inline bool same_text(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }
bool same_place(const std::source_location& a, const std::source_location& b);

}  // namespace specengine::sim
