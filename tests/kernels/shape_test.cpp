#include "kernels/shape.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "src/base/error.h"

namespace cpattn {
namespace {

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was refused";
}

#define EXPECT_REFUSED(call, text) \
  EXPECT_NE(message_of([&] { call; }).find(text), std::string::npos) << message_of([&] { call; })

TEST(Shape, CuSeqlensBecomeDocuments) {
  const SequenceBatch batch = batch_from_cu_seqlens({0, 0, 3, 3, 5}, {0, 2, 5, 5, 9}, 5, 10);

  ASSERT_EQ(batch.documents.size(), 4u);
  EXPECT_EQ(batch.q_rows, 5);
  EXPECT_EQ(batch.kv_rows, 10);
  EXPECT_EQ(batch.documents[0].q_tokens, 0);
  EXPECT_EQ(batch.documents[0].kv_tokens, 2);
  EXPECT_EQ(batch.documents[1].q_begin, 0);
  EXPECT_EQ(batch.documents[1].q_tokens, 3);
  EXPECT_EQ(batch.documents[1].kv_begin, 2);
  EXPECT_EQ(batch.documents[3].q_begin, 3);
  EXPECT_EQ(batch.documents[3].kv_begin, 5);
  EXPECT_EQ(batch.documents[3].kv_tokens, 4);
  EXPECT_NO_THROW(validate(batch));
}

TEST(Shape, MalformedCuSeqlensAreRefusedByArrayAndIndex) {
  EXPECT_REFUSED(batch_from_cu_seqlens({1, 3}, {0, 3}, 12, 12), "cu_seqlens_q[0] is 1");
  EXPECT_REFUSED(batch_from_cu_seqlens({0, 3}, {1, 3}, 12, 12), "cu_seqlens_kv[0] is 1");
  EXPECT_REFUSED(batch_from_cu_seqlens({0, 5, 4}, {0, 5, 5}, 12, 12), "cu_seqlens_q[2] is 4");
  EXPECT_REFUSED(batch_from_cu_seqlens({0, 3, 12}, {0, 3, 13}, 12, 12), "cu_seqlens_kv[2] is 13");
  EXPECT_REFUSED(batch_from_cu_seqlens({}, {0, 3}, 12, 12), "cu_seqlens_q is empty");
  EXPECT_REFUSED(batch_from_cu_seqlens({0, 3}, {0, 3, 4}, 12, 12), "cu_seqlens_kv has 3 entries");
  EXPECT_REFUSED(batch_from_cu_seqlens({0}, {0}, -1, 12), "-1 rows");
}

TEST(Shape, PaddedSlotsBecomeDocuments) {
  const SequenceBatch batch = batch_from_padded({0, 4, 12}, {3, 5}, 12);

  ASSERT_EQ(batch.documents.size(), 2u);
  EXPECT_EQ(batch.documents[1].q_begin, 4);
  EXPECT_EQ(batch.documents[1].kv_begin, 4);
  EXPECT_EQ(batch.documents[1].kv_tokens, 5);
  EXPECT_EQ(batch.q_rows, 12);
  EXPECT_NO_THROW(validate(batch));
}

TEST(Shape, PaddedLengthsMustFitTheirSlots) {
  EXPECT_REFUSED(batch_from_padded({0, 4, 12}, {5, 5}, 12), "lengths[0] is 5, expected 0 to 4");
  EXPECT_REFUSED(batch_from_padded({0, 4, 12}, {3, -1}, 12), "lengths[1] is -1");
  EXPECT_REFUSED(batch_from_padded({0, 4, 12}, {3}, 12), "lengths has 1 entries, expected 2");
  EXPECT_REFUSED(batch_from_padded({0, 4, 3}, {3, 0}, 12), "cu_seqlens_padded[2] is 3");
}

TEST(Shape, DocumentsMustLieInsideAndApart) {
  const auto check = [](const Document& first, const Document& second) {
    validate(SequenceBatch{{first, second}, 10, 10});
  };
  EXPECT_NO_THROW(check({5, 5, 0, 5}, {0, 5, 5, 5}));  // any order
  EXPECT_NO_THROW(check({0, 5, 0, 5}, {3, 0, 3, 0}));  // empty ones may sit anywhere

  EXPECT_REFUSED(check({0, 5, 0, 5}, {4, 5, 5, 5}), "documents[0] and documents[1] overlap at q");
  EXPECT_REFUSED(check({0, 5, 0, 6}, {5, 5, 5, 5}), "documents[0] and documents[1] overlap at kv");
  EXPECT_REFUSED(check({0, 5, 0, 5}, {5, 6, 5, 5}), "documents[1] has q_begin 5 and q_tokens 6");
  EXPECT_REFUSED(check({-1, 1, 0, 5}, {5, 5, 5, 5}), "documents[0] has q_begin -1");
  EXPECT_REFUSED(check({0, 1, 0, -5}, {5, 5, 5, 5}), "documents[0].kv_tokens is -5");
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_REFUSED(check({1, kHuge, 0, 5}, {5, 5, 5, 5}), "documents[0] has q_begin 1");
}

TEST(Shape, EveryProblemOfAShapeIsNamedAtOnce) {
  EXPECT_NO_THROW(validate(AttentionShape{9, 3, 64, 64, 0.125}));
  EXPECT_NO_THROW(validate(AttentionShape{1, 1, 1, 256, 0.0}));
  EXPECT_NO_THROW(validate(AttentionShape{1, 1, 256, 1, -2.0}));

  EXPECT_REFUSED(validate(AttentionShape{6, 4, 64, 64, 1.0}),
                 "num_heads is 6, expected a multiple of num_kv_heads = 4");
  EXPECT_REFUSED(validate(AttentionShape{2, 4, 64, 64, 1.0}), "num_heads is 2");
  EXPECT_REFUSED(validate(AttentionShape{0, 1, 64, 64, 1.0}), "num_heads is 0");
  EXPECT_REFUSED(validate(AttentionShape{4, 0, 64, 64, 1.0}), "num_kv_heads is 0");
  EXPECT_REFUSED(validate(AttentionShape{4, 4, 257, 64, 1.0}),
                 "head_dim is 257, expected 1 to 256");
  EXPECT_REFUSED(validate(AttentionShape{4, 4, 64, 0, 1.0}), "value_dim is 0");
  EXPECT_REFUSED(validate(AttentionShape{4, 4, 64, 64, std::nan("")}), "softmax_scale is nan");
  EXPECT_REFUSED(validate(AttentionShape{4, 4, 64, 64, 1e39}), "softmax_scale is 1e+39");
  EXPECT_REFUSED(validate(AttentionShape{3, 2, 0, 64, 1.0}), "; head_dim is 0");
}

}  // namespace
}  // namespace cpattn
