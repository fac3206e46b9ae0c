#include "src/base/json_text.h"

#include <gtest/gtest.h>

namespace cpattn {
namespace {

TEST(JsonText, QuotesWhatJsonReserves) {
  EXPECT_EQ(json_quote(""), R"("")");
  EXPECT_EQ(json_quote("a/b 'c'"), R"("a/b 'c'")");
  EXPECT_EQ(json_quote("\"\\"), R"("\"\\")");
  EXPECT_EQ(json_quote(std::string_view("\0\n\t\x1f\x7f", 5)),
            R"("\u0000\u000a\u0009\u001f\u007f")");
  EXPECT_EQ(json_quote("\xc3\xa4"), "\"\xc3\xa4\"");  // UTF-8 passes
}

TEST(JsonText, WritesMembersInOrder) {
  EXPECT_EQ(JsonText().text(), "{}");
  EXPECT_EQ(JsonText()
                .add("text", "x")
                .add("yes", true)
                .add("count", std::int64_t{-3})
                .add("none", std::vector<std::string>{})
                .add("list", std::vector<std::string>{"a", "\""})
                .text(),
            R"({"text": "x", "yes": true, "count": -3, "none": [], "list": ["a", "\""]})");
}

}  // namespace
}  // namespace cpattn
