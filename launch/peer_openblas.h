// The peer of bench: attention made of OpenBLAS matrix products and a vectorised softmax, the
// honest opponent on a CPU.
//
// Per head and run of 256 query rows: scores = q k^T (sgemm), softmax, out = p v (sgemm); under a
// causal mask the columns in the future of the whole run are never computed. Heads are spread over
// threads, each product runs on one. OpenBLAS is loaded at run time, nothing links to it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cp/ring_attention.h"
#include "kernels/mask.h"

namespace cpattn {

/// What the peer computes: f32, contiguous [S, H, D]; k and v may have fewer heads.
struct PeerProblem {
  AnyConstTensor q;
  AnyConstTensor k;
  AnyConstTensor v;
  MaskKind mask = MaskKind::causal;
  int threads = 1;
};

class OpenBlasPeer {
 public:
  /// cblas_sgemm.
  using Sgemm = void (*)(int order, int transpose_a, int transpose_b, int m, int n, int k,
                         float alpha, const float* a, int lda, const float* b, int ldb, float beta,
                         float* c, int ldc);

  /// Nothing when libopenblas.so.0 is not there. First removes OPENBLAS_CORETYPE and
  /// OPENBLAS_L2_SIZE from the environment of this process: set by some environments, they make
  /// OpenBLAS pick slower code than it would for this machine. Call it before threads start.
  static std::unique_ptr<OpenBlasPeer> load();

  /// One line for those who lack it.
  static std::string remedy();

  /// On any sgemm that may be called from several threads at once.
  OpenBlasPeer(Sgemm sgemm, std::string description)
      : sgemm_(sgemm), description_(std::move(description)) {}

  /// "OpenBLAS 0.3.21 ... SkylakeX": version and the code it chose.
  const std::string& description() const { return description_; }

  /// out [S, H, D] f32, contiguous. Memory for the scores is kept from call to call.
  void attend(const PeerProblem& problem, float* out);

 private:
  void attend_head(const PeerProblem& problem, std::int64_t head, float* scores, float* out) const;

  Sgemm sgemm_;
  std::string description_;
  std::vector<std::vector<float>> scores_;  // of each thread: [256, S]
};

namespace detail {

/// Turns rows of base-2 logits into weights, in place: row i (of `stride` floats) sees its first
/// visible_begin + i keys, at most `num_keys`, or all of them when visible_begin is negative; what
/// it does not see becomes 0. inverse_sum[i] = 1 / sum of row i's weights.
struct SoftmaxRows {
  float* scores = nullptr;
  std::int64_t stride = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_keys = 0;
  std::int64_t visible_begin = -1;
  float* inverse_sum = nullptr;
};
void softmax_rows(const SoftmaxRows& rows);

}  // namespace detail
}  // namespace cpattn
