#include "launch/cli_values.h"

#include <fmt/format.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <system_error>
#include <type_traits>

#include "src/base/dtype.h"

namespace cpattn {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// A decimal may not begin with a zero that another digit follows: C reads 0100 as 64, people as
/// 100.
bool has_leading_zero(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return text.size() > 1 && text[0] == '0' && is_digit(text[1]);
}

template <class T>
constexpr bool kIsInteger = std::is_integral_v<T>;

/// An integer has no sign of zero: what was meant cannot be told.
bool is_minus_zero(std::string_view text) { return text == "-0"; }

template <class T>
std::optional<T> from_decimal(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc{} || result.ptr != end || has_leading_zero(text)) return std::nullopt;
  return value;
}

template <class T>
T parse_decimal(const RunField& field, const ScalarText& scalar, const T* type) {
  const std::optional<T> value = scalar.is_quoted ? std::nullopt : from_decimal<T>(scalar.text);
  // The bounds are exact as T; what is read may not be exact as a double. NaN fails both.
  const bool is_in_range = value && *value >= static_cast<T>(field.min) &&
                           *value <= static_cast<T>(field.max) &&
                           !(kIsInteger<T> && is_minus_zero(scalar.text));
  require(is_in_range, "expected ", expected_scalar(field, type), ", got ",
          scalar.is_quoted ? "quoted text " : "", "'", scalar.text, "'");
  return *value;
}

bool obeys(TextRule rule, const std::string& text) {
  switch (rule) {
    case TextRule::any:
      return !text.empty() && std::none_of(text.begin(), text.end(),
                                           [](unsigned char c) { return c < 0x20 || c == 0x7f; });
    case TextRule::isa_or_auto:
      return text == "auto" || from_name<Isa>(text).has_value();
    case TextRule::dtype_or_same:
      return text == "same" || from_name<DType>(text).has_value();
    case TextRule::arch_or_auto:
      return text == "auto" || (text.starts_with("sm_") && from_decimal<int>(text.substr(3)) > 0);
    case TextRule::number_or_auto: {
      const std::optional<double> number = from_decimal<double>(text);
      return text == "auto" || (number && std::isfinite(*number));
    }
  }
  return false;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string expected_scalar(const RunField& field, const std::int64_t*) {
  return fmt::format("an integer in [{}, {}]", static_cast<std::int64_t>(field.min),
                     static_cast<std::int64_t>(field.max));
}
std::string expected_scalar(const RunField& field, const double*) {
  return fmt::format("a number in [{}, {}]", format_scalar(field.min), format_scalar(field.max));
}
std::string expected_scalar(const RunField&, const bool*) { return "true | false"; }
std::string expected_scalar(const RunField& field, const std::string*) {
  switch (field.rule) {
    case TextRule::any:
      return "text without control characters";
    case TextRule::isa_or_auto:
      return "auto | " + choices<Isa>();
    case TextRule::dtype_or_same:
      return "same | " + choices<DType>();
    case TextRule::number_or_auto:
      return "auto or a finite number";
    case TextRule::arch_or_auto:
      return "auto or an architecture such as sm_90";
  }
  return "?";
}

std::int64_t parse_scalar(const RunField& field, const ScalarText& scalar,
                          const std::int64_t* type) {
  return parse_decimal(field, scalar, type);
}
double parse_scalar(const RunField& field, const ScalarText& scalar, const double* type) {
  return parse_decimal(field, scalar, type);
}
bool parse_scalar(const RunField& field, const ScalarText& scalar, const bool* type) {
  const bool is_known = scalar.text == "true" || scalar.text == "false";
  require(is_known && !scalar.is_quoted, "expected ", expected_scalar(field, type), ", got ",
          scalar.is_quoted ? "quoted text " : "", "'", scalar.text, "'");
  return scalar.text == "true";
}
std::string parse_scalar(const RunField& field, const ScalarText& scalar, const std::string* type) {
  require(obeys(field.rule, scalar.text), "expected ", expected_scalar(field, type), ", got '",
          scalar.text, "'");
  return scalar.text;
}

std::string format_scalar(std::int64_t value) { return std::to_string(value); }
std::string format_scalar(double value) {
  char text[32];
  const auto result = std::to_chars(text, text + sizeof(text), value);
  return std::string(text, result.ptr);
}
std::string format_scalar(bool value) { return value ? "true" : "false"; }
std::string format_scalar(const std::string& value) { return value; }

std::string nearest_name(std::string_view name, std::span<const std::string> candidates) {
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(name, candidate);
    if (distance < best_distance && distance < candidate.size()) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

std::string suggestion(std::string_view name, std::span<const std::string> candidates) {
  const std::string nearest = nearest_name(name, candidates);
  return nearest.empty() ? "" : ", did you mean '" + nearest + "'?";
}

std::vector<ScalarText> split_list(std::string_view text) {
  std::vector<ScalarText> items;
  for (;;) {
    const std::size_t comma = text.find(',');
    std::string_view item = text.substr(0, comma);
    while (item.starts_with(' ')) item.remove_prefix(1);
    while (item.ends_with(' ')) item.remove_suffix(1);
    items.push_back({std::string(item), false});
    if (comma == std::string_view::npos) return items;
    text.remove_prefix(comma + 1);
  }
}

}  // namespace cpattn
