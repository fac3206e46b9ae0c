// Strict scalars: what is refused matters more than what is read.
#include "launch/cli_values.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cpattn {
namespace {

const RunField kCount{{"count", "", 1, 16777216}, FieldGroup::ring};
const RunField kSeconds{{"seconds", "", 0.001, 86400}, FieldGroup::ring};
const RunField kScale{{"scale", ""}, FieldGroup::kernels, TextRule::number_or_auto};

template <class T>
T parse(const RunField& field, const std::string& text, bool is_quoted = false) {
  T value{};
  const std::vector<ScalarText> items{{text, is_quoted}};
  parse_value(field, items, value);
  return value;
}

template <class T>
std::string refusal(const RunField& field, const std::string& text, bool is_quoted = false) {
  try {
    parse<T>(field, text, is_quoted);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(CliValues, IntegersArePlainDecimalsBC126) {
  EXPECT_EQ(parse<std::int64_t>(kCount, "100"), 100);
  EXPECT_EQ(parse<std::int64_t>(kCount, "16777216"), 16777216);

  for (const char* text :
       {"0100", "08", "0o20", "0x10", "1e3", "12.0", "-4", "99999999999", "", "true", "off", "+5",
        " 5", "5 ", "1_000", "16777217", "0", "9223372036854775808", "nan"}) {
    EXPECT_EQ(refusal<std::int64_t>(kCount, text),
              "expected an integer in [1, 16777216], got '" + std::string(text) + "'");
  }
  EXPECT_EQ(refusal<std::int64_t>(kCount, "64", true),
            "expected an integer in [1, 16777216], got quoted text '64'");
}

TEST(CliValues, ZeroAndNegativeAreValuesWhereTheRangeHoldsThem) {
  const RunField field{{"x", "", -5, 5}, FieldGroup::ring};

  EXPECT_EQ(parse<std::int64_t>(field, "0"), 0);
  EXPECT_EQ(parse<std::int64_t>(field, "-5"), -5);
  EXPECT_EQ(refusal<std::int64_t>(field, "-05"), "expected an integer in [-5, 5], got '-05'");
  EXPECT_EQ(refusal<std::int64_t>(field, "-0"), "expected an integer in [-5, 5], got '-0'");
}

TEST(CliValues, BoundsAreExactWhereDoublesAreNot) {
  const RunField seed{{"x", "", 0, 9007199254740992.0}, FieldGroup::ring};

  EXPECT_EQ(parse<std::int64_t>(seed, "9007199254740992"), 9007199254740992);
  EXPECT_EQ(refusal<std::int64_t>(seed, "9007199254740993"),
            "expected an integer in [0, 9007199254740992], got '9007199254740993'");
}

TEST(CliValues, NumbersAreFiniteDecimals) {
  EXPECT_EQ(parse<double>(kSeconds, "0.25"), 0.25);
  EXPECT_EQ(parse<double>(kSeconds, "1e3"), 1000.0);

  for (const char* text :
       {"nan", "inf", "-inf", "0x10", "", "0.0001", "86401", "1e999", "1,5", "5s", "007", "off"}) {
    EXPECT_EQ(refusal<double>(kSeconds, text),
              "expected a number in [0.001, 86400], got '" + std::string(text) + "'");
  }
}

TEST(CliValues, BooleansAreTwoWords) {
  EXPECT_TRUE(parse<bool>(kCount, "true"));
  EXPECT_FALSE(parse<bool>(kCount, "false"));

  for (const char* text : {"off", "on", "yes", "no", "1", "0", "", "True"}) {
    EXPECT_EQ(refusal<bool>(kCount, text),
              "expected true | false, got '" + std::string(text) + "'");
  }
  EXPECT_NE(refusal<bool>(kCount, "true", true), "accepted");
}

TEST(CliValues, ScaleIsAutoOrAnyFiniteNumber) {
  for (const char* text : {"auto", "0", "-0.5", "1e-3"}) {
    EXPECT_EQ(parse<std::string>(kScale, text), text);
  }
  for (const char* text : {"nan", "inf", "", "Auto", "0.1x", "1/8"}) {
    EXPECT_EQ(refusal<std::string>(kScale, text),
              "expected auto or a finite number, got '" + std::string(text) + "'");
  }
}

TEST(CliValues, EnumsNameTheirChoices) {
  EXPECT_EQ(parse<MaskKind>(kCount, "full"), MaskKind::full);
  EXPECT_EQ(refusal<MaskKind>(kCount, "Causal"), "expected full | causal, got 'Causal'");
}

TEST(CliValues, ListsHaveNoEmptyElementAndLanesNoRepeatedOne) {
  const RunField lane{{"cp", "", 1, 4096}, FieldGroup::lanes};
  const RunField lengths{{"cu", "", 0, 100}, FieldGroup::synthetic};
  std::vector<std::int64_t> list;
  const auto message = [&](const RunField& field, const std::string& text) -> std::string {
    try {
      parse_value(field, split_list(text), list);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };

  EXPECT_EQ(message(lane, "1, 2,7"), "accepted");
  EXPECT_EQ(list, (std::vector<std::int64_t>{1, 2, 7}));
  EXPECT_EQ(message(lengths, "0,3,3"), "accepted");
  EXPECT_EQ(message(lane, "2,2"), "'2' appears twice");
  for (const char* text : {"", ",", "1,", ",1", "1,,2"}) {
    EXPECT_EQ(message(lane, text), "expected an integer in [1, 4096], got ''") << text;
  }
}

TEST(CliValues, FormattedNumbersReadBack) {
  for (const double value : {60.0, 0.001, 0.1, 86400.0, 1.0 / 3.0}) {
    EXPECT_EQ(parse<double>(kSeconds, format_scalar(value)), value);
  }
}

TEST(CliValues, SuggestsOnlyWhatIsNear) {
  const std::vector<std::string> names{"--heads", "--kv-heads", "--chunk-tokens"};

  EXPECT_EQ(nearest_name("--head", names), "--heads");
  EXPECT_EQ(nearest_name("--chunk-token", names), "--chunk-tokens");
  EXPECT_EQ(nearest_name("--completely-different-flag", names), "");
}

}  // namespace
}  // namespace cpattn
