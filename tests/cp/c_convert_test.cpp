#include "cp/bindings/c_convert.h"

#include <gtest/gtest.h>

#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "cp/bindings/c_handles.h"

namespace cpattn::c {

/// A struct that has grown since the first version.
struct Grown {
  std::size_t struct_size = sizeof(Grown);
  std::int64_t first = 1;
  std::int64_t later = 7;
};
template <>
struct StructVersions<Grown> {
  static constexpr std::size_t kFirstSize = offsetof(Grown, later);
  static Grown defaults() { return {}; }
};

namespace {

/// What the library reads of a caller whose struct has `size` bytes, and no byte behind them.
Grown read(std::size_t size, const std::vector<std::int64_t>& fields) {
  std::vector<std::int64_t> memory{static_cast<std::int64_t>(size)};
  memory.insert(memory.end(), fields.begin(), fields.end());
  return read_struct(reinterpret_cast<const Grown*>(memory.data()), "grown");
}

TEST(ReadStruct, OlderCallersGetTheDefaultsOfWhatTheyDoNotKnow) {
  const Grown old = read(16, {5});
  EXPECT_EQ(old.first, 5);
  EXPECT_EQ(old.later, 7);
  EXPECT_EQ(read(24, {5, 6}).later, 6);
}

TEST(ReadStruct, NewerCallersMayNotSetWhatIsUnknown) {
  EXPECT_EQ(read(32, {5, 6, 0}).later, 6);
  EXPECT_THROW(read(32, {5, 6, 1}), Unsupported);
}

TEST(ReadStruct, NothingIsSmallerThanTheFirstVersion) {
  EXPECT_THROW(read(15, {5}), InvalidArgument);
  EXPECT_EQ(StructVersions<cpattn_problem>::kFirstSize, sizeof(cpattn_problem));
}

/// Whatever keeps a rank from its part of a collective call, the others are told.
TEST(MadeOrRefused, TellsOfEveryException) {
  const auto told = [](const auto& failure) {
    std::string text;
    const auto refuse = [&text](const char* why) {
      text = why;
      throw InvalidArgument(why);
    };
    EXPECT_THROW(made_or_refused([&]() -> int { throw failure; }, refuse), InvalidArgument);
    return text;
  };
  EXPECT_EQ(told(InvalidArgument("q: NULL")), "q: NULL");
  EXPECT_EQ(told(std::length_error("too long")), "too long");
  EXPECT_EQ(told(std::bad_alloc()), std::bad_alloc().what());
  EXPECT_EQ(made_or_refused([] { return 3; }, [](const char*) {}), 3);
}

}  // namespace
}  // namespace cpattn::c
