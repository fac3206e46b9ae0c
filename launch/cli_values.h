// Text to value and back, strictly, for every type a knob may have; shared by YAML and flags.
//
// Integers are plain decimals: no leading zero, sign only '-', no exponent, no other base, so that
// 0100 is refused and never 64. Numbers are finite decimals. Booleans are true and false only.
// Quoted text (YAML) is text: it is refused where a number or a boolean belongs.
#pragma once

#include <algorithm>
#include <charconv>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "launch/run_config.h"
#include "src/base/error.h"

namespace cpattn {

/// One scalar as it was written.
struct ScalarText {
  std::string text;
  bool is_quoted = false;
};

std::int64_t parse_scalar(const RunField& field, const ScalarText& scalar, const std::int64_t*);
double parse_scalar(const RunField& field, const ScalarText& scalar, const double*);
bool parse_scalar(const RunField& field, const ScalarText& scalar, const bool*);
std::string parse_scalar(const RunField& field, const ScalarText& scalar, const std::string*);

/// What is accepted: "an integer in [1, 64]". The pointer picks the type and is not read.
std::string expected_scalar(const RunField& field, const std::int64_t*);
std::string expected_scalar(const RunField& field, const double*);
std::string expected_scalar(const RunField& field, const bool*);
std::string expected_scalar(const RunField& field, const std::string*);

std::string format_scalar(std::int64_t value);
std::string format_scalar(double value);  ///< the shortest text that reads back to the same
std::string format_scalar(bool value);
std::string format_scalar(const std::string& value);

template <NamedEnum E>
std::string expected_scalar(const RunField&, const E*) {
  return choices<E>();
}

template <NamedEnum E>
E parse_scalar(const RunField& field, const ScalarText& scalar, const E* type) {
  const auto value = from_name<E>(scalar.text);
  require(value.has_value(), "expected ", expected_scalar(field, type), ", got '", scalar.text,
          "'");
  return *value;
}

template <NamedEnum E>
std::string format_scalar(E value) {
  return std::string(name_of(value));
}

template <class T>
inline constexpr bool kIsList = false;
template <class T>
inline constexpr bool kIsList<std::vector<T>> = true;

/// The name a vector<E> or E knob is described by.
template <class T>
std::string expected_value(const RunField& field, const T& value) {
  if constexpr (kIsList<T>) {
    return expected_scalar(field, value.data()) + ", one or more";
  } else {
    return expected_scalar(field, &value);
  }
}

/// Sets `value` from what was written. InvalidArgument says what was expected and what came.
template <class T>
void parse_value(const RunField& field, std::span<const ScalarText> items, T& value) {
  if constexpr (kIsList<T>) {
    require(!items.empty(), "expected ", expected_value(field, value), ", got an empty list");
    T list;
    for (const ScalarText& item : items) {
      const auto element = parse_scalar(field, item, value.data());
      const bool is_repeated = std::find(list.begin(), list.end(), element) != list.end();
      require(field.group != FieldGroup::lanes || !is_repeated, "'", item.text, "' appears twice");
      list.push_back(element);
    }
    value = std::move(list);
  } else {
    require(items.size() == 1, "expected ", expected_value(field, value), ", got a list");
    value = parse_scalar(field, items.front(), &value);
  }
}

/// "1,2,4"; the separator is "," on the command line and ", " in YAML.
template <class T>
std::string format_value(const T& value, std::string_view separator) {
  if constexpr (kIsList<T>) {
    std::string text;
    for (const auto& element : value) {
      if (!text.empty()) text += separator;
      text += format_scalar(element);
    }
    return text;
  } else {
    return format_scalar(value);
  }
}

/// The candidate closest to `name` when it is close enough to be a slip of the hand; empty
/// otherwise.
std::string nearest_name(std::string_view name, std::span<const std::string> candidates);

/// ", did you mean 'x'?" or nothing.
std::string suggestion(std::string_view name, std::span<const std::string> candidates);

/// "8, 9" -> {"8", "9"}: cuts at commas and trims spaces; empty pieces stay and are refused later.
std::vector<ScalarText> split_list(std::string_view text);

}  // namespace cpattn
