#include "kernels/cuda/ptx.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/kernels/cuda/host_test.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using cuda_host::Landing;

class Ptx : public HostTest {};

/// Copies 32 pieces of 16 bytes in three groups and looks at them after waits for all but
/// num_newest.
template <int NumNewest>
__global__ void copy_groups(const std::uint32_t* source, std::uint32_t* out) {
  CP_DYNAMIC_SMEM(memory);
  const unsigned lane = threadIdx.x;
  const ptx::SharedAddress base = ptx::shared_address(memory);
  for (unsigned group = 0; group < 3; ++group) {
    const unsigned piece = group * 32 + lane;
    ptx::copy_async16(base + piece * 16, source + piece * 4, lane != 5);
    ptx::commit_copies();
  }
  ptx::wait_copies<NumNewest>();
  __syncwarp();
  const auto* words = reinterpret_cast<const std::uint32_t*>(memory);
  for (unsigned i = lane; i < 3 * 128; i += 32) out[i] = words[i];
  __syncwarp();
  ptx::wait_copies<0>();
}

TEST_F(Ptx, CopiesLandByTheGroup) {
  std::vector<std::uint32_t> source(3 * 128);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = i + 1;
  in_all_modes([&] {
    const auto check = [&](auto kernel, std::size_t num_newest) {
      std::vector<std::uint32_t> out(source.size());
      run(kernel, dim3(1), dim3(32), source.size() * 4, source.data(), out.data());
      const bool is_late = executor_.options().landing == Landing::late;
      const std::size_t landed = is_late ? (3 - num_newest) * 128 : source.size();
      for (std::size_t i = 0; i < source.size(); ++i) {
        const std::uint32_t expected = i >= landed ? 0xffffffffu : i / 4 % 32 == 5 ? 0u : source[i];
        EXPECT_EQ(out[i], expected) << "word " << i;
      }
    };
    check(copy_groups<0>, 0);
    check(copy_groups<1>, 1);
    check(copy_groups<2>, 2);
  });
}

__global__ void copy_one(const std::byte* source, int to) {
  CP_DYNAMIC_SMEM(memory);
  ptx::copy_async16(ptx::shared_address(memory) + static_cast<unsigned>(to), source, true);
  ptx::commit_copies();
  ptx::wait_copies<0>();
}
__global__ void copy_and_leave(const std::byte* source) {
  CP_DYNAMIC_SMEM(memory);
  ptx::copy_async16(ptx::shared_address(memory), source, true);
  ptx::commit_copies();
}

TEST_F(Ptx, BadCopiesAreNamed) {
  alignas(16) const std::byte source[48]{};
  in_all_modes([&] {
    EXPECT_EQ(problem(copy_one, dim3(1), dim3(1), 64, source, 48), "");
    EXPECT_PRED2(contains, problem(copy_one, dim3(1), dim3(1), 64, source, 56),
                 "shared address 1080: this access needs a multiple of 16");
    EXPECT_PRED2(contains, problem(copy_one, dim3(1), dim3(1), 64, source, 64),
                 "shared addresses 1088 to 1104: the block has 1024 to 1088");
    EXPECT_PRED2(contains, problem(copy_one, dim3(1), dim3(1), 64, source + 8, 0),
                 "the global address is not a multiple of 16");
    EXPECT_PRED2(contains, problem(copy_and_leave, dim3(1), dim3(1), 64, source),
                 "exits with 1 copies (cp.async) it never waited for");
  });
}

/// A[16][16] B[16][8] from row-major matrices in shared memory, the way a kernel loads them: A by
/// rows, B [k][n] transposed. Rows are `pitch` bytes apart.
template <class T>
__global__ void multiply_loaded(const T* a, const T* b, float* d, int pitch) {
  CP_DYNAMIC_SMEM(memory);
  const unsigned lane = threadIdx.x, step = static_cast<unsigned>(pitch);
  std::byte* b_rows = memory + 16 * step;
  for (unsigned i = lane; i < 16 * 16; i += 32) {
    *reinterpret_cast<T*>(memory + i / 16 * step + i % 16 * 2) = a[i];
  }
  for (unsigned i = lane; i < 16 * 8; i += 32) {
    *reinterpret_cast<T*>(b_rows + i / 8 * step + i % 8 * 2) = b[i];
  }
  __syncwarp();
  std::uint32_t a_registers[4], b_registers[2];
  ptx::load_matrices(a_registers, ptx::shared_address(memory) + lane % 16 * step + lane / 16 * 16);
  ptx::load_transposed(b_registers, ptx::shared_address(b_rows) + lane % 16 * step);
  float sum[4] = {};
  ptx::multiply(sum, a_registers, b_registers[0], b_registers[1], T{});
  const unsigned row = lane / 4, column = 2 * (lane % 4);
  d[row * 8 + column] = sum[0];
  d[row * 8 + column + 1] = sum[1];
  d[(row + 8) * 8 + column] = sum[2];
  d[(row + 8) * 8 + column + 1] = sum[3];
}

template <class T>
std::vector<T> small_integers(std::size_t count, std::uint64_t seed) {
  std::vector<T> numbers(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(testing::random_integer(seed, i, -8, 8));
    if constexpr (std::is_same_v<T, bf16>) {
      numbers[i] = to_bf16(value);
    } else {
      numbers[i] = to_f16(value);
    }
  }
  return numbers;
}

template <class T>
void expect_product(const std::vector<T>& a, const std::vector<T>& b, const float* d) {
  for (std::size_t i = 0; i < 16; ++i) {
    for (std::size_t j = 0; j < 8; ++j) {
      float expected = 0.0f;  // exact: integers below 2^24
      for (std::size_t k = 0; k < 16; ++k)
        expected += to_float(a[16 * i + k]) * to_float(b[8 * k + j]);
      EXPECT_EQ(d[8 * i + j], expected) << i << ", " << j;
    }
  }
}

TEST_F(Ptx, MatricesLoadAndMultiplyAsDefined) {
  in_all_modes([&] {
    std::vector<float> d(16 * 8);
    const auto a = small_integers<bf16>(256, 1), b = small_integers<bf16>(128, 2);
    run(multiply_loaded<bf16>, dim3(1), dim3(32), 32 * 48, a.data(), b.data(), d.data(), 48);
    expect_product(a, b, d.data());
    const auto a16 = small_integers<f16>(256, 3), b16 = small_integers<f16>(128, 4);
    run(multiply_loaded<f16>, dim3(1), dim3(32), 32 * 48, a16.data(), b16.data(), d.data(), 48);
    expect_product(a16, b16, d.data());
  });
}

TEST_F(Ptx, BankConflictsOfLoadsAreCounted) {
  const auto a = small_integers<bf16>(256, 1), b = small_integers<bf16>(128, 2);
  std::vector<float> d(16 * 8);
  // Eight rows 48 bytes apart lie in different banks; 64 bytes apart, in four times two; 128 bytes
  // apart, all in the same.
  for (const auto& [pitch, conflicts] : {std::pair{48, 0u}, {64, 6u * 3}, {128, 6u * 7}}) {
    executor_.reset_counters();
    run(multiply_loaded<bf16>, dim3(1), dim3(32), static_cast<std::size_t>(32 * pitch), a.data(),
        b.data(), d.data(), pitch);
    EXPECT_EQ(executor_.counters().ldmatrix_phases, 6u);
    EXPECT_EQ(executor_.counters().ldmatrix_conflicts, conflicts) << pitch << " bytes";
  }
}

}  // namespace
}  // namespace cpattn::cuda
