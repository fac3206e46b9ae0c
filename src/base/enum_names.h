// Names of our own enums, written once: text to value and back, and "one of ..." for messages.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace cpattn {

template <class E>
struct NamedValue {
  E value;
  std::string_view name;
};

/// Specialise with `static constexpr std::array<NamedValue<E>, N> kValues`, all enumerators, each
/// once.
template <class E>
struct EnumNames;

template <class E>
concept NamedEnum = requires {
  EnumNames<E>::kValues;
};

template <NamedEnum E>
constexpr std::string_view name_of(E value) {
  for (const auto& entry : EnumNames<E>::kValues) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

template <NamedEnum E>
constexpr std::optional<E> from_name(std::string_view name) {
  for (const auto& entry : EnumNames<E>::kValues) {
    if (entry.name == name) return entry.value;
  }
  return std::nullopt;
}

/// "a | b | c"
template <NamedEnum E>
std::string choices() {
  std::string text;
  for (const auto& entry : EnumNames<E>::kValues) {
    if (!text.empty()) text += " | ";
    text += entry.name;
  }
  return text;
}

}  // namespace cpattn
