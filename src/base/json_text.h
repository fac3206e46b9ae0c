// JsonText: a JSON object written key by key. Nothing else below the roof needs JSON, so this is
// a few lines of our own; what reads JSON lives in launch.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cpattn {

/// `text` as a JSON string literal. Control characters are escaped; other bytes pass (UTF-8 stays
/// UTF-8).
inline std::string json_quote(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += "\\u00";
      quoted += kHex[byte >> 4];
      quoted += kHex[byte & 15];
    } else {
      quoted += c;
    }
  }
  return quoted += '"';
}

class JsonText {
 public:
  JsonText& add(std::string_view key, std::string_view value) {
    return add_raw(key, json_quote(value));
  }
  JsonText& add(std::string_view key, const char* value) {
    return add(key, std::string_view(value));
  }
  template <std::integral Number>
  JsonText& add(std::string_view key, Number value) {
    if constexpr (std::same_as<Number, bool>) {
      return add_raw(key, value ? "true" : "false");
    } else {
      return add_raw(key, std::to_string(value));
    }
  }
  JsonText& add(std::string_view key, const std::vector<std::string>& values) {
    std::string list = "[";
    for (const std::string& value : values) {
      list += list.size() > 1 ? ", " : "";
      list += json_quote(value);
    }
    return add_raw(key, list + "]");
  }

  /// The object; one line.
  std::string text() const { return "{" + members_ + "}"; }

 private:
  JsonText& add_raw(std::string_view key, std::string_view value) {
    members_ += members_.empty() ? "" : ", ";
    members_ += json_quote(key);
    members_ += ": ";
    members_ += value;
    return *this;
  }

  std::string members_;
};

}  // namespace cpattn
