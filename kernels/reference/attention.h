// The oracle for accuracy: attention in double precision, naive, two passes, sharing no code with
// the fast kernels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/mask.h"
#include "kernels/reference/tensor.h"
#include "kernels/shape.h"

namespace cpattn::reference {

struct AttentionArgs {
  AttentionShape shape;
  SequenceBatch batch;
  MaskKind mask = MaskKind::full;
  Tensor q;                            ///< [q_rows, Hq, D], global
  Tensor k;                            ///< [kv_rows, Hkv, D]
  Tensor v;                            ///< [kv_rows, Hkv, Dv]
  std::span<const std::int64_t> rows;  ///< global q rows to compute, any order; empty: all
  int num_threads = 1;                 ///< rows are dealt to std::threads; no bit depends on it
};

struct AttentionResult {
  std::vector<double> out;         ///< [rows, Hq, Dv]
  std::vector<double> lse;         ///< [rows, Hq]
  std::vector<double> logit_size;  ///< [rows, Hq]: sum_j p_j |logit_j|, of those that carry weight
  /// [rows, Hq]: sum_j p_j |softmax_scale| |q| |k_j| / sqrt(D), what these logits are summed from.
  std::vector<double> part_size;
  /// [rows, Hq]: sqrt(sum_j (p_j |v_j|)^2), what out is summed from.
  std::vector<double> term_size;
};

/// out = softmax(softmax_scale * q k^T + mask) v and lse, rows in the order asked for. A row that
/// sees no key, and a padding row, give out = 0, lse = -inf. NaN inputs give NaN. Logits are
/// computed in double from the exact inputs.
///
/// Errors  InvalidArgument for shapes that do not fit, rows out of range.
/// Cost    2 * pairs * Hq * (D + Dv) flop in double; memory for one head of k and v in double.
AttentionResult attention(const AttentionArgs& args);

}  // namespace cpattn::reference
