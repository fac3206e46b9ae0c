// The JSON header of a safetensors file: grammar only; what it says about bytes is checked by the
// reader.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "launch/safetensors.h"

namespace cpattn {

struct HeaderEntry {
  std::string name;
  StoredType type = StoredType::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< bytes from the start of the data
  std::uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<HeaderEntry> entries;  ///< in the order of the text
  std::map<std::string, std::string> metadata;
};

/// Reads the header text of `path`. InvalidArgument for anything but the header's grammar: keys
/// that repeat, fields that miss or are unknown, values of another type. Memory: linear in `json`.
SafetensorsHeader parse_safetensors_header(const std::string& path, std::string_view json);

/// The inverse, padded with spaces so that 8 + its length is a multiple of 8.
std::string safetensors_header_text(const SafetensorsHeader& header);

}  // namespace cpattn
