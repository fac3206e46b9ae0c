#include "launch/parity_delivery.h"

#include <gtest/gtest.h>

#include "cp/sharding.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// 10 queries over 6 keys in chunks of 2, dealt to two ranks.
struct Dealt {
  Problem problem{.shape = {.num_heads = 2, .num_kv_heads = 1, .head_dim = 3, .value_dim = 4},
                  .batch = batch_of_one(10, 6),
                  .dtype = DType::bf16,
                  .out_dtype = DType::f32};
  Sharding sharding = make_sharding(problem.batch, {.chunk_tokens = 2}, 2);

  /// What a rank sends when every element of a row is the number of the row.
  std::vector<std::byte> message(std::size_t rank) const {
    const Shard& shard = sharding.shards[rank];
    const auto tensors = make_result_tensors(problem, true, shard.q_rows, shard.kv_rows);
    for (const ResultTensor& tensor : tensors) {
      const auto rows = global_rows(has_key_rows(tensor.role) ? shard.kv : shard.q);
      for (std::int64_t i = 0; i < tensor.shape[0]; ++i)
        for (std::int64_t j = 0; j < tensor.shape[1] * tensor.shape[2]; ++j)
          store_from_float(tensor.view().row(i, 0), tensor.dtype, j,
                           static_cast<float>(rows[static_cast<std::size_t>(i)]));
    }
    RankReceipt receipt;
    receipt.rank = static_cast<int>(rank);
    return pack_delivery(receipt, tensors);
  }
};

TEST(Delivery, PutsEveryRowWhereItBelongsOnce) {
  const Dealt dealt;
  LaneResult result = make_lane_result(dealt.problem, true);
  for (const std::size_t rank : {1u, 0u})
    unpack_delivery(dealt.message(rank), dealt.sharding.shards[rank], result);

  EXPECT_EQ(result.ranks[0].rank, 1);
  for (const ResultTensor& tensor : result.tensors)
    for (std::int64_t row = 0; row < tensor.shape[0]; ++row)
      for (std::int64_t j = 0; j < tensor.shape[1] * tensor.shape[2]; ++j)
        EXPECT_EQ(load_as_float(tensor.view().row(row, 0), tensor.dtype, j),
                  static_cast<float>(row))
            << name_of(tensor.role);
  for (std::int64_t row = 0; row < 10; ++row) EXPECT_EQ(result.deliveries(false)[row], 1);
  for (std::int64_t row = 0; row < 6; ++row) EXPECT_EQ(result.deliveries(true)[row], 1);
}

TEST(Delivery, CountsRowsThatComeTwice) {
  const Dealt dealt;
  LaneResult result = make_lane_result(dealt.problem, true);
  const std::int64_t key = global_rows(dealt.sharding.shards[0].kv)[0];
  for (int i = 0; i < 300; ++i) unpack_delivery(dealt.message(0), dealt.sharding.shards[0], result);

  EXPECT_EQ(result.deliveries(true)[key], 255);
  EXPECT_EQ(result.deliveries(false)[global_rows(dealt.sharding.shards[1].q)[0]], 0);
}

TEST(Delivery, OfAnotherLengthIsRefused) {
  const Dealt dealt;
  LaneResult result = make_lane_result(dealt.problem, true);
  std::vector<std::byte> message = dealt.message(0);
  const std::span<const std::byte> whole(message);

  EXPECT_THROW(unpack_delivery(whole.first(4), dealt.sharding.shards[0], result), InternalError);
  EXPECT_THROW(unpack_delivery(whole.first(whole.size() - 1), dealt.sharding.shards[0], result),
               InternalError);
  message.push_back(std::byte{0});
  EXPECT_THROW(unpack_delivery(message, dealt.sharding.shards[0], result), InternalError);
}

}  // namespace
}  // namespace cpattn
