#include "kernels/cuda/sum_dkv.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cuda/gradient_slots.h"
#include "src/device/memory.h"
#include "tests/kernels/cuda/host_test.h"
#include "tests/support/host_tensor.h"
#include "tests/support/random.h"

namespace cpattn::cuda {
namespace {

using testing::HostTensor;
using testing::kNan;

constexpr std::int64_t kHeads = 2, kDim = 6, kValueDim = 9, kRows = 100;
constexpr float kScale = -0.3f;

class SumDkv : public HostTest {
 protected:
  SumDkv() {
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      const PackChunk& chunk = chunks_[i % chunks_.size()];
      memory_[i] = Buffer(dkv_slot_bytes(problem_, chunk.num_keys));
      auto* floats = memory_[i].as<float>();
      for (std::size_t k = 0; k < memory_[i].size_bytes() / sizeof(float); ++k)
        floats[k] = testing::random_normal(i, k);
    }
  }

  /// Slot `number` of a chunk.
  std::byte* slot(std::int32_t chunk, std::size_t number) {
    return memory_[number * chunks_.size() + static_cast<std::size_t>(chunk)].data();
  }
  DkvOp op(DkvOpKind kind, std::int32_t chunk, std::size_t dst, std::size_t left,
           std::size_t right) {
    return {kind, chunk, slot(chunk, dst), slot(chunk, left), slot(chunk, right)};
  }

  void run(const std::vector<DkvOp>& ops, HostTensor& dk, HostTensor& dv) {
    sum_dkv({.problem = problem_,
             .chunks = chunks_,
             .ops = ops,
             .dk = dk.view(),
             .dv = dv.view(),
             .progress = {},
             .stream = {static_cast<cudaStream_t>(&executor_)}});
  }

  /// What a slot holds of dk (or dv) of a key.
  static float value(const float* floats, std::int64_t num_keys, std::int64_t head,
                     std::int64_t key, std::int64_t d, bool is_dk) {
    const GradientSlotForm form{kDim, kValueDim};
    const std::int64_t first = head * form.head_floats(num_keys);
    return is_dk ? floats[first + key * form.dk_floats() + d]
                 : floats[first + num_keys * form.dk_floats() + key * form.dv_floats() + d];
  }

  std::vector<PackChunk> chunks_{{5, 40, 0}, {45, 3, 0}, {60, 33, 0}};
  KernelProblem problem_{.shape = {4, kHeads, kDim, kValueDim, kScale}};
  std::array<Buffer, 12> memory_;  ///< four slots for each chunk
};

TEST_F(SumDkv, OpsOfAChunkAreExecutedInOrder) {
  const auto snapshot = [&] {
    std::vector<std::vector<float>> all;
    for (const Buffer& buffer : memory_)
      all.emplace_back(buffer.as<float>(),
                       buffer.as<float>() + buffer.size_bytes() / sizeof(float));
    return all;
  };
  in_all_modes([&] {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      HostTensor dk(dtype, {kRows, kHeads, kDim}, {kHeads * kDim + 3, kDim, 1});
      HostTensor dv(dtype, {kRows, kHeads, kValueDim}, {kValueDim, kRows * kValueDim, 1});
      const std::vector<std::vector<float>> before = snapshot();
      run({op(DkvOpKind::sum, 2, 0, 0, 1), op(DkvOpKind::sum, 0, 1, 0, 1),
           op(DkvOpKind::finish_empty, 1, 0, 0, 0), op(DkvOpKind::copy, 0, 2, 1, 0),
           op(DkvOpKind::sum, 0, 3, 2, 3), op(DkvOpKind::finish, 0, 0, 3, 0)},
          dk, dv);
      for (std::size_t k = 0; k < before[0].size(); ++k) {
        const float sum = before[0][k] + before[3][k];
        ASSERT_EQ(memory_[3].as<float>()[k], sum);
        ASSERT_EQ(memory_[6].as<float>()[k], sum);
        ASSERT_EQ(memory_[9].as<float>()[k], sum + before[9][k]);
      }
      const std::int64_t floats = kHeads * gradient_slot_form(problem_.shape).head_floats(33);
      for (std::size_t k = 0; k < static_cast<std::size_t>(floats); ++k)  // behind them: alignment
        ASSERT_EQ(memory_[2].as<float>()[k], before[2][k] + before[5][k]);
      const float* finished = memory_[9].as<float>();
      for (std::int64_t row = 0; row < kRows; ++row)
        for (std::int64_t head = 0; head < kHeads; ++head)
          for (std::int64_t d = 0; d < kValueDim; ++d) {
            HostTensor expected(dtype, {1, 1, 2});
            expected.set(0, 0, 0, kNan);
            expected.set(0, 0, 1, kNan);
            const std::int64_t key = row - 5;
            if (key >= 0 && key < 40) {
              if (d < kDim) expected.set(0, 0, 0, value(finished, 40, head, key, d, true) * kScale);
              expected.set(0, 0, 1, value(finished, 40, head, key, d, false));
            } else if (row >= 45 && row < 48) {
              expected.set(0, 0, 0, 0.0f);
              expected.set(0, 0, 1, 0.0f);
            }
            const auto is_same = [](float a, float b) { return a == b || (a != a && b != b); };
            if (d < kDim) {
              ASSERT_TRUE(is_same(dk.at(row, head, d), expected.at(0, 0, 0))) << row << " " << d;
            }
            ASSERT_TRUE(is_same(dv.at(row, head, d), expected.at(0, 0, 1))) << row << " " << d;
          }
    }
  });
}

TEST_F(SumDkv, ManyOpsTakeSeveralLaunches) {
  HostTensor dk(DType::f32, {kRows, kHeads, kDim}), dv(DType::f32, {kRows, kHeads, kValueDim});
  std::vector<DkvOp> ops;
  for (Buffer& buffer : memory_)
    std::fill_n(buffer.as<float>(), buffer.size_bytes() / sizeof(float), 1.0f);
  for (int i = 0; i < 100; ++i)  // Fibonacci's numbers, modulo nothing: order shows
    ops.push_back(op(DkvOpKind::sum, i % 3, static_cast<std::size_t>(i / 3 % 2), 0, 1));

  run(ops, dk, dv);

  for (std::int32_t chunk = 0; chunk < 3; ++chunk) {
    float slots[2] = {1.0f, 1.0f};
    for (int i = chunk; i < 100; i += 3) slots[i / 3 % 2] = slots[0] + slots[1];
    EXPECT_EQ(*reinterpret_cast<const float*>(slot(chunk, 0)), slots[0]);
    EXPECT_EQ(*reinterpret_cast<const float*>(slot(chunk, 1)), slots[1]);
  }
}

TEST_F(SumDkv, ZeroRows) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    HostTensor tensor(dtype, {kRows, kHeads, kDim}, {kDim, kRows * kDim + 1, 1});
    tensor.fill_normal(1);
    zero_rows({.tensor = tensor.view(),
               .row_begin = 10,
               .num_rows = 20,
               .stream = {static_cast<cudaStream_t>(&executor_)}});
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t head = 0; head < kHeads; ++head)
        for (std::int64_t d = 0; d < kDim; ++d)
          EXPECT_EQ(tensor.bits_at(row, head, d) == 0u, row >= 10 && row < 30) << row;
  }
}

}  // namespace
}  // namespace cpattn::cuda
