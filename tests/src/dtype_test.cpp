#include "src/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace cpattn {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// The two short formats as numbers: everything the independent double arithmetic below needs.
struct F16 {
  using Storage = f16;
  static constexpr int kFractionBits = 10;
  static constexpr int kMinExponent = -14;
  static constexpr int kMaxExponent = 15;
  static Storage round(float value) { return to_f16(value); }
};
struct BF16 {
  using Storage = bf16;
  static constexpr int kFractionBits = 7;
  static constexpr int kMinExponent = -126;
  static constexpr int kMaxExponent = 127;
  static Storage round(float value) { return to_bf16(value); }
};

template <class Format>
double decode(std::uint16_t bits) {
  const int fraction = bits & ((1 << Format::kFractionBits) - 1);
  const int max_field = Format::kMaxExponent - Format::kMinExponent + 2;
  const int field = (bits & 0x7fff) >> Format::kFractionBits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (field == max_field) return fraction == 0 ? sign * kInfinity : std::nan("");
  if (field == 0) return sign * std::ldexp(fraction, Format::kMinExponent - Format::kFractionBits);
  return sign * std::ldexp(fraction + (1 << Format::kFractionBits),
                           field - 1 + Format::kMinExponent - Format::kFractionBits);
}

/// To nearest, ties to even, in double: both the quotient by a power of two and std::nearbyint are
/// exact.
template <class Format>
double round_in_double(double value) {
  if (value == 0.0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), Format::kMinExponent);
  const double quantum = std::ldexp(1.0, exponent - Format::kFractionBits);
  const double rounded = std::nearbyint(value / quantum) * quantum;
  const double limit = std::ldexp(1.0, Format::kMaxExponent + 1);
  return std::abs(rounded) >= limit ? std::copysign(kInfinity, value) : rounded;
}

template <class Format>
class ShortFloat : public testing::Test {};
using Formats = testing::Types<F16, BF16>;
TYPED_TEST_SUITE(ShortFloat, Formats);

TYPED_TEST(ShortFloat, EveryBitPatternDecodesAndRoundTrips) {
  for (std::uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    const float value = to_float(typename TypeParam::Storage{bits});
    const double expected = decode<TypeParam>(bits);

    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      ASSERT_TRUE(std::isnan(to_float(TypeParam::round(value)))) << pattern;
      ASSERT_EQ(TypeParam::round(value).bits & 0x8000, bits & 0x8000) << pattern;
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << pattern;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << pattern;
      ASSERT_EQ(TypeParam::round(value).bits, bits);
    }
  }
}

// Between every two neighbours: the tie itself and the f32 values just below and above it.
TYPED_TEST(ShortFloat, RoundsToNearestTiesToEvenBetweenAllNeighbours) {
  const std::uint16_t infinity = TypeParam::round(kInfinity).bits;
  for (std::uint16_t bits = 0; bits + 1 < infinity; ++bits) {
    const float below = to_float(typename TypeParam::Storage{bits});
    const float above = to_float(typename TypeParam::Storage{static_cast<std::uint16_t>(bits + 1)});
    const float tie = below + (above - below) / 2;  // one bit more than the format: exact in f32
    for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, kInfinity)}) {
      for (const float sign : {1.0f, -1.0f}) {
        const double expected = round_in_double<TypeParam>(sign * static_cast<double>(value));
        ASSERT_EQ(static_cast<double>(to_float(TypeParam::round(sign * value))), expected)
            << value << " above pattern " << bits;
      }
    }
    ASSERT_EQ(TypeParam::round(tie).bits & 1, 0) << "tie above pattern " << bits;
  }
}

TYPED_TEST(ShortFloat, KeepsTheSignOfZeroAndOfInfinity) {
  EXPECT_EQ(TypeParam::round(0.0f).bits, 0x0000);
  EXPECT_EQ(TypeParam::round(-0.0f).bits, 0x8000);
  EXPECT_EQ(to_float(TypeParam::round(-kInfinity)), -kInfinity);
  EXPECT_EQ(std::signbit(to_float(TypeParam::round(-std::numeric_limits<float>::denorm_min()))),
            true);
}

TYPED_TEST(ShortFloat, NanWithOnlyLowFractionBitsStaysNan) {
  for (const std::uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fc00000u}) {
    EXPECT_TRUE(std::isnan(to_float(TypeParam::round(std::bit_cast<float>(bits))))) << bits;
  }
}

TEST(DType, F16OverflowsAt65520) {
  EXPECT_EQ(to_float(to_f16(65504.0f)), 65504.0f);
  EXPECT_EQ(to_float(to_f16(std::nextafter(65520.0f, 0.0f))), 65504.0f);
  EXPECT_EQ(to_float(to_f16(65520.0f)), kInfinity);
  EXPECT_EQ(to_float(to_f16(-1e30f)), -kInfinity);
}

TEST(DType, Bf16OverflowsHalfAStepAboveItsLargest) {
  const float largest = to_float(bf16{0x7f7f});
  const float half_step = 0x1p119f;  // the last kept bit of 2^127 is 2^120

  EXPECT_EQ(to_float(to_bf16(std::nextafter(largest + half_step, 0.0f))), largest);
  EXPECT_EQ(to_float(to_bf16(largest + half_step)), kInfinity);
  EXPECT_EQ(to_float(to_bf16(std::numeric_limits<float>::max())), kInfinity);
}

TEST(DType, F16DenormalsAreKept) {
  EXPECT_EQ(to_f16(0x1p-24f).bits, 1);
  EXPECT_EQ(to_f16(0x1p-25f).bits, 0);  // a tie: to even
  EXPECT_EQ(to_f16(std::nextafter(0x1p-25f, 1.0f)).bits, 1);
  EXPECT_EQ(to_f16(std::nextafter(0x1p-14f, 0.0f)).bits, 0x0400);  // rounds up to the first normal
  EXPECT_EQ(to_float(f16{0x03ff}), 1023 * 0x1p-24f);
}

TEST(DType, EpsilonIsTheDistanceFromOneToTheNextValue) {
  EXPECT_EQ(epsilon(DType::f32), std::numeric_limits<float>::epsilon());
  EXPECT_EQ(epsilon(DType::f16), decode<F16>(to_f16(1.0f).bits + 1) - 1.0);
  EXPECT_EQ(epsilon(DType::bf16), decode<BF16>(to_bf16(1.0f).bits + 1) - 1.0);
}

TEST(DType, LoadAndStoreAgreeWithTheConversions) {
  const float value = 1.0f / 3.0f;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::vector<float> memory(4, 0.0f);

    store_from_float(memory.data(), dtype, 2, value);

    const float expected = dtype == DType::f32   ? value
                           : dtype == DType::f16 ? to_float(to_f16(value))
                                                 : to_float(to_bf16(value));
    EXPECT_EQ(load_as_float(memory.data(), dtype, 2), expected) << name_of(dtype);
    EXPECT_EQ(load_as_float(memory.data(), dtype, 1), 0.0f) << name_of(dtype);
    EXPECT_EQ(load_as_float(memory.data(), dtype, 3), 0.0f) << name_of(dtype);
  }
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::f16), 2u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(choices<DType>(), "f32 | f16 | bf16");
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    EXPECT_EQ(from_name<DType>(name_of(dtype)), dtype);
  EXPECT_FALSE(from_name<DType>("float").has_value());
}

}  // namespace
}  // namespace cpattn
