#include "launch/peer_openblas.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "launch/bench_problem.h"
#include "src/base/dtype.h"

namespace cpattn {
namespace {

/// Logits that both halves of the f32 range of 2^x see, some of them far below the largest.
std::vector<float> logits(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = 40.0f * std::sin(static_cast<float>(i) * 1.7f);
  }
  return values;
}

// exp2 of the peer: relative 2e-7 of the polynomial, and its argument is a difference of numbers up
// to 40, exact to 40 * 2^-24, which exp2 makes a relative error of log 2 times as much.
constexpr double kWeightError = 2e-7 + 0.7 * 80 * 0x1p-24 + 0x1p-23;

TEST(PeerSoftmax, RowsAgainstDoublePrecision) {
  constexpr std::int64_t kStride = 64, kRows = 5;
  for (const std::int64_t keys : {1, 15, 16, 17, 50}) {
    for (const std::int64_t visible_begin : {-1, 1, 14}) {
      const std::vector<float> before = logits(kRows * kStride);
      std::vector<float> weights = before;
      std::vector<float> inverse(kRows);

      detail::softmax_rows({.scores = weights.data(),
                            .stride = kStride,
                            .num_rows = kRows,
                            .num_keys = keys,
                            .visible_begin = visible_begin,
                            .inverse_sum = inverse.data()});

      for (std::int64_t row = 0; row < kRows; ++row) {
        const std::int64_t visible = visible_begin < 0 ? keys : std::min(keys, visible_begin + row);
        const float* in = before.data() + row * kStride;
        double largest = in[0], sum = 0.0;
        for (std::int64_t key = 0; key < visible; ++key) {
          largest = std::max(largest, static_cast<double>(in[key]));
        }
        for (std::int64_t key = 0; key < visible; ++key) sum += std::exp2(in[key] - largest);
        for (std::int64_t key = 0; key < keys; ++key) {
          const double weight = key < visible ? std::exp2(in[key] - largest) : 0.0;
          EXPECT_NEAR(weights[static_cast<std::size_t>(row * kStride + key)], weight,
                      weight * kWeightError)
              << "keys " << keys << " row " << row << " key " << key;
        }
        EXPECT_NEAR(inverse[static_cast<std::size_t>(row)] * sum, 1.0,
                    kWeightError + static_cast<double>(keys) * 0x1p-24);
      }
    }
  }
}

TEST(PeerOpenBlas, LoadsOrSaysWhatToInstall) {
  ::setenv("OPENBLAS_CORETYPE", "Prescott", 1);

  const auto peer = OpenBlasPeer::load();

  EXPECT_EQ(std::getenv("OPENBLAS_CORETYPE"), nullptr);
  EXPECT_NE(OpenBlasPeer::remedy().find("libopenblas0-pthread"), std::string::npos);
  const std::string description = peer ? peer->description() : "OpenBLAS";
  EXPECT_NE(description.find("OpenBLAS"), std::string::npos);
}

/// Row-major c = alpha a b (or b^T), and nothing else of sgemm.
void plain_sgemm(int, int, int transpose_b, int m, int n, int k, float alpha, const float* a,
                 int lda, const float* b, int ldb, float, float* c, int ldc) {
  constexpr int kTransposed = 112;
  for (int row = 0; row < m; ++row) {
    for (int column = 0; column < n; ++column) {
      float sum = 0.0f;
      for (int i = 0; i < k; ++i) {
        sum += a[row * lda + i] *
               (transpose_b == kTransposed ? b[column * ldb + i] : b[i * ldb + column]);
      }
      c[row * ldc + column] = alpha * sum;
    }
  }
}

void expect_plain_attention(OpenBlasPeer& peer) {
  for (const MaskKind mask : {MaskKind::full, MaskKind::causal}) {
    const BenchProblem problem{DType::f32, mask, 24, 300, 4, 2};
    const BenchTensors tensors(problem, 300, 300, 0);
    const ForwardTensors views = tensors.tensors();
    std::vector<float> out(300 * 4 * 24);
    peer.attend({views.q, views.k, views.v, mask, 2}, out.data());

    double difference = 0.0, norm = 0.0;
    for (std::int64_t row = 0; row < 300; ++row) {
      const std::int64_t keys = mask == MaskKind::causal ? row + 1 : 300;
      const auto* q = reinterpret_cast<const float*>(views.q.row(row, 3));
      std::vector<double> exact(24);
      double sum = 0.0;
      for (std::int64_t key = 0; key < keys; ++key) {
        const auto* k = reinterpret_cast<const float*>(views.k.row(key, 1));
        const auto* v = reinterpret_cast<const float*>(views.v.row(key, 1));
        double logit = 0.0;
        for (int d = 0; d < 24; ++d) logit += static_cast<double>(q[d]) * k[d];
        const double weight = std::exp(logit / std::sqrt(24.0));
        sum += weight;
        for (int d = 0; d < 24; ++d) exact[static_cast<std::size_t>(d)] += weight * v[d];
      }
      for (int d = 0; d < 24; ++d) {
        const double value = exact[static_cast<std::size_t>(d)] / sum;
        const double delta = out[static_cast<std::size_t>((row * 4 + 3) * 24 + d)] - value;
        difference += delta * delta;
        norm += value * value;
      }
    }
    // As in bench: to first order one rounding per product.
    EXPECT_LE(std::sqrt(difference / norm), epsilon(DType::f32) * (300 + 24))
        << peer.description() << " " << name_of(mask);
  }
}

TEST(PeerOpenBlas, EqualsPlainAttention) {
  OpenBlasPeer plain(plain_sgemm, "plain");
  expect_plain_attention(plain);

  const auto loaded = OpenBlasPeer::load();
  if (loaded) expect_plain_attention(*loaded);
}

}  // namespace
}  // namespace cpattn
