#include "src/base/tensor_view.h"

#include <gtest/gtest.h>
#include <sys/mman.h>  // address space without memory behind it

#include <numeric>
#include <vector>

namespace cpattn {
namespace {

TEST(TensorView, ContiguousStridesAreRowMajor) {
  EXPECT_EQ((contiguous_strides<3>({5, 3, 2})), (std::array<std::int64_t, 3>{6, 2, 1}));
  EXPECT_EQ((contiguous_strides<2>({0, 7})), (std::array<std::int64_t, 2>{7, 1}));

  std::vector<int> elements(30);
  std::iota(elements.begin(), elements.end(), 0);
  const auto view = contiguous_view(elements.data(), std::array<std::int64_t, 3>{5, 3, 2});
  int expected = 0;
  for (int i = 0; i < 5; ++i)
    for (int j = 0; j < 3; ++j)
      for (int k = 0; k < 2; ++k) EXPECT_EQ(view(i, j, k), expected++);
}

TEST(TensorView, StridesMaySkipAndRunBackwards) {
  std::vector<int> elements(24);
  std::iota(elements.begin(), elements.end(), 0);
  const TensorView<int, 2> columns{elements.data() + 1, {4, 2}, {6, 2}};
  const TensorView<int, 1> backwards{elements.data() + 23, {24}, {-1}};

  EXPECT_EQ(columns(3, 1), 21);
  EXPECT_EQ(backwards(23), 0);
  columns(0, 0) = 100;
  EXPECT_EQ(elements[1], 100);
}

TEST(TensorView, AnyTensorRowsCountInElementsOfItsType) {
  std::vector<float> memory(24);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const AnyTensor tensor = contiguous_tensor(memory.data(), dtype, {4, 3, 2});
    const AnyConstTensor readable = tensor;

    const auto* base = reinterpret_cast<const std::byte*>(memory.data());
    EXPECT_EQ(tensor.row(2, 1) - base, static_cast<std::ptrdiff_t>(14 * size_of(dtype)));
    EXPECT_EQ(readable.row(2, 1), tensor.row(2, 1));
    EXPECT_EQ(readable.shape, tensor.shape);
  }
}

/// Address space only: rows are located, never touched.
class Reservation {
 public:
  explicit Reservation(std::size_t size_bytes)
      : size_bytes_(size_bytes),
        address_(mmap(nullptr, size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0)) {}
  ~Reservation() {
    if (address_ != MAP_FAILED) munmap(address_, size_bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  void* address() const { return address_; }

 private:
  std::size_t size_bytes_;
  void* address_;
};

// One token past 2^31 elements: every offset helper is exact in 64 bits.
TEST(BC_077, OffsetsAreExactPast31Bits) {
  constexpr std::int64_t kHeads = 16, kDim = 64;
  struct Case {
    std::int64_t num_tokens, last_row, last_fused_row;
  };
  for (const Case& at :
       {Case{2097152, 2147482624, 6442447872}, Case{2097153, 2147483648, 6442450944}}) {
    const std::int64_t last = at.num_tokens - 1;
    const std::array<std::int64_t, 3> shape{at.num_tokens, kHeads, kDim};
    const TensorView<float, 3> packed{nullptr, shape, contiguous_strides(shape)};
    const TensorView<float, 3> fused{nullptr, shape, {3 * kHeads * kDim, kDim, 1}};

    EXPECT_EQ(packed.offset(last, 0, 0), at.last_row);
    EXPECT_EQ(packed.offset(last, 15, 63), at.last_row + 1023);
    EXPECT_EQ(fused.offset(last, 0, 0), at.last_fused_row);
    EXPECT_EQ(fused.offset(last, 15, 63), at.last_fused_row + 1023);
    // int indices, as a kernel passes them, must not narrow the product.
    EXPECT_EQ(packed.offset(static_cast<int>(last), 0, 0), at.last_row);
    EXPECT_EQ(fused.offset(static_cast<int>(last), 0, 0), at.last_fused_row);
  }
}

TEST(BC_077, RowAddressesAreExactPast31Bits) {
  constexpr std::int64_t kTokens = 2097153, kHeads = 16, kDim = 64, kFused = 3 * kHeads * kDim;
  const Reservation memory(static_cast<std::size_t>(kTokens * kFused) * sizeof(float));
  ASSERT_NE(memory.address(), MAP_FAILED);
  const auto base = reinterpret_cast<std::uintptr_t>(memory.address());

  for (const DType dtype : {DType::f32, DType::bf16}) {
    const AnyTensor fused{memory.address(), dtype, {kTokens, kHeads, kDim}, {kFused, kDim, 1}};
    const AnyTensor packed = contiguous_tensor(memory.address(), dtype, {kTokens, kHeads, kDim});

    EXPECT_EQ(fused.offset(kTokens - 1, 15), 6442450944 + 960);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(fused.row(kTokens - 1, 15)) - base,
              (6442450944u + 960u) * size_of(dtype));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(packed.row(kTokens - 1, 0)) - base,
              2147483648u * size_of(dtype));
  }
  const TensorView<bf16, 3> view{
      static_cast<bf16*>(memory.address()), {kTokens, kHeads, kDim}, {kFused, kDim, 1}};
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(&view(kTokens - 1, 0, 0)) - base, 2u * 6442450944u);
}

TEST(AnyTensor, OnlyALastStrideThatLeadsSomewhereMatters) {
  const auto has_contiguous_rows = [](std::array<std::int64_t, 3> shape, std::int64_t last) {
    return AnyTensor{nullptr, DType::f32, shape, {shape[1] * shape[2], shape[2], last}}
        .has_contiguous_rows();
  };
  EXPECT_TRUE(has_contiguous_rows({3, 2, 4}, 1));
  for (const std::int64_t stride : {0, 2, -1}) {
    EXPECT_FALSE(has_contiguous_rows({3, 2, 4}, stride)) << stride;
    EXPECT_FALSE(has_contiguous_rows({1, 1, 2}, stride)) << stride;
    EXPECT_TRUE(has_contiguous_rows({3, 2, 1}, stride)) << stride;
    EXPECT_TRUE(has_contiguous_rows({0, 2, 4}, stride)) << stride;
    EXPECT_TRUE(has_contiguous_rows({3, 0, 4}, stride)) << stride;
  }
}

}  // namespace
}  // namespace cpattn
