// The oracle for gradients: dq, dk, dv in double precision, straight from the formulas, sharing no
// code with the fast kernels.
//
//   p_ij  = exp(s_ij - lse_i),  s_ij = softmax_scale q_i.k_j     delta_i = dout_i.out_i - dlse_i
//   ds_ij = p_ij (dout_i.v_j - delta_i)
//   dq_i  = softmax_scale sum_j ds_ij k_j
//   dk_j  = softmax_scale sum_i ds_ij q_i      dv_j = sum_i p_ij dout_i
//                                              (sums over all rows i of all heads of the group)
//
// dk and dv of one key need lse and delta of every row that sees it. Those of all rows cost as much
// as the whole forward; a caller that wants few keys of a long sequence brings them
// (RowStatistics).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/mask.h"
#include "kernels/reference/tensor.h"
#include "kernels/shape.h"

namespace cpattn::reference {

struct GradientArgs {
  AttentionShape shape;
  SequenceBatch batch;
  MaskKind mask = MaskKind::full;
  Tensor q;             ///< [q_rows, Hq, D], global
  Tensor k;             ///< [kv_rows, Hkv, D]
  Tensor v;             ///< [kv_rows, Hkv, Dv]
  Tensor dout;          ///< [q_rows, Hq, Dv]
  Tensor dlse;          ///< [q_rows, Hq, 1]; no data: zeros
  int num_threads = 1;  ///< rows are dealt to std::threads; no bit depends on it
};

/// What the backward takes from the forward, of every row and head [q_rows, Hq].
struct RowStatistics {
  std::vector<double> lse;         ///< -inf: the row saw no key
  std::vector<double> logit_size;  ///< of the logits that carry weight (attention.h)
  std::vector<double> delta;       ///< dout.out - dlse
  std::vector<double> delta_size;  ///< sqrt(sum_d (dout[d] out[d])^2): what delta is summed from
};

/// How far a gradient row moves (2-norm) when something in every term of its sum is off by its own
/// size, independently in every term: what a bound of rounding errors starts from. With
///   t^2 = s^2 + logit_size^2 + (softmax_scale |q| |k|)^2 / D    a logit, those in lse, their parts
///   a^2 = (dout.v)^2 + (|dout| |v|)^2 / Dv                      dout.v and its parts
///   b^2 = delta^2 + delta_size^2                                delta and its parts
/// and w x a term (ds k, ds q times the scale, or p dout; w is ds or p). A row has one delta, so in
/// dq p |x| is summed over the keys before it is squared; dv knows no product and no delta.
struct Sensitivity {
  double weight = 0.0;  ///< sqrt(sum (w |x|)^2)
  double logit = 0.0;  ///< sqrt(sum (w t |x|)^2 + sum (p b logit_size |x|)^2): delta moves with out
  double lse = 0.0;    ///< sqrt(sum (w lse |x|)^2)
  double product = 0.0;  ///< sqrt(sum (p a |x|)^2)
  double delta = 0.0;    ///< sqrt(sum (p b |x|)^2)
  /// sum (|x| (|w / p| + 1) + sqrt(dim)): what is lost when p, w and w x of every term lose 1.
  double underflow = 0.0;
};

struct GradientRows {
  std::vector<double> values;              ///< [rows, heads, dim]
  std::vector<Sensitivity> sensitivities;  ///< [rows, heads]
};

struct Gradient {
  GradientRows dq;  ///< [rows, Hq, D]
  GradientRows dk;  ///< [rows, Hkv, D]
  GradientRows dv;  ///< [rows, Hkv, Dv]
};

/// Cost  2 * pairs * Hq * (D + Dv) flop.
RowStatistics row_statistics(const GradientArgs& args);

/// The statistics [rows, Hq] of some rows from their out [rows, Hq, Dv] and lse [rows, Hq, 1].
/// `logit_size` [rows, Hq]; empty: |lse| stands in.
RowStatistics statistics_of(const GradientArgs& args, std::span<const std::int64_t> rows,
                            const Tensor& out, const Tensor& lse,
                            std::span<const double> logit_size);

/// dq of the q rows and dk, dv of the kv rows that are asked for, in that order; an empty list asks
/// for none. Rows that see no key, keys that no row sees, and padding rows have zero gradients.
///
/// Errors  InvalidArgument for shapes that do not fit, rows out of range.
/// Order   heads of a group ascending, then rows or keys ascending.
/// Cost    2 * Hq * (2 D + Dv) flop per pair of a q row, 2 * Hq * (2 D + 2 Dv) of a kv row;
///         memory for one head of q, k, v and dout in double.
Gradient gradient_of_rows(const GradientArgs& args, const RowStatistics& statistics,
                          std::span<const std::int64_t> q_rows,
                          std::span<const std::int64_t> kv_rows);

/// The gradients of all rows from nothing but the inputs.
Gradient gradient(const GradientArgs& args);

}  // namespace cpattn::reference
