// A 64-bit digest of plain values, the same on every machine: what ranks compare before they trust
// each other.
//
// FNV-1a over little-endian bytes; every value is preceded by its length, so ("ab", "c") and ("a",
// "bc") differ.
#pragma once

#include <cstdint>
#include <string_view>

namespace cpattn {

class Digest {
 public:
  void add(std::string_view text) {
    add(static_cast<std::int64_t>(text.size()));
    for (const char c : text) add_byte(static_cast<std::uint8_t>(c));
  }
  void add(std::int64_t number) {
    for (int i = 0; i < 8; ++i)
      add_byte(static_cast<std::uint8_t>(static_cast<std::uint64_t>(number) >> (8 * i)));
  }
  std::uint64_t value() const { return state_; }

 private:
  void add_byte(std::uint8_t byte) { state_ = (state_ ^ byte) * 0x100000001b3ull; }
  std::uint64_t state_ = 0xcbf29ce484222325ull;
};

}  // namespace cpattn
