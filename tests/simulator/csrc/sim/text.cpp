#include "sim/text.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace specengine::sim {

std::string text_of(uint3 i) {
  return "(" + std::to_string(i.x) + "," + std::to_string(i.y) + "," + std::to_string(i.z) + ")";
}

std::string text_of(const std::source_location& where) {
  const char* slash = std::strrchr(where.file_name(), '/');
  return std::string(slash ? slash + 1 : where.file_name()) + ":" + std::to_string(where.line());
}

std::string text_of_mask(unsigned lanes) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", lanes);
  return text;
}

std::string text_of(const Site& site) {
  if (site.where) return " at " + text_of(*site.where);
  Dl_info module;
  if (site.instruction == nullptr || dladdr(site.instruction, &module) == 0) return "";
  const auto offset = static_cast<const char*>(site.instruction) - static_cast<const char*>(module.dli_fbase);
  char command[4096];
  std::snprintf(command, sizeof(command), "addr2line -i -e '%s' 0x%zx 2>/dev/null", module.dli_fname,
                static_cast<size_t>(offset) - 1);  // a return address lies behind its call
  std::string text;
  FILE* const output = popen(command, "r");
  if (output == nullptr) return "";
  char line[4096];
  while (std::fgets(line, sizeof(line), output)) {
    std::string place = line;
    if (place.find("/sim/") != std::string::npos && place.find(".h:") != std::string::npos) continue;  // our own
    place = place.substr(place.rfind('/') + 1);
    place = place.substr(0, place.find_first_of(" \n"));
    if (!place.empty() && place[0] != '?') text += (text.empty() ? " at " : " in ") + place;
  }
  pclose(output);
  return text;
}

bool same_place(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() && same_text(a.file_name(), b.file_name());
}

}  // namespace specengine::sim
