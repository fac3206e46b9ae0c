// The layers between the attentions: each row (token) is computed by itself, in one fixed order, so
// its bits do not depend on which other rows this rank holds. Only gradients of parameters meet
// other rows, and those go leaf by leaf into an ordered sum.
#pragma once

#include <cpattn/shard_tools.h>

#include <cstdint>
#include <vector>

#include "parameter.h"

namespace trainer {

/// Activations of this rank's tokens: [rows, width], row-major.
struct Matrix {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::vector<float> data;

  Matrix() = default;
  Matrix(std::int64_t num_rows, std::int64_t num_columns)
      : rows(num_rows),
        width(num_columns),
        data(static_cast<std::size_t>(num_rows * num_columns), 0.0f) {}
  float* row(std::int64_t r) { return data.data() + r * width; }
  const float* row(std::int64_t r) const { return data.data() + r * width; }
};

void add(Matrix& to, const Matrix& from);

/// The leaves this rank owns, ascending, and how the sums over all ranks' leaves are made.
class TokenSums {
 public:
  TokenSums(cpattn::Communicator& group, std::vector<cpattn::LeafRows> leaves,
            std::int64_t num_leaves, double timeout_seconds);

  const std::vector<cpattn::LeafRows>& leaves() const { return leaves_; }

  /// sum[i] over the tokens of all ranks of what `add_rows(leaf, partial)` puts into the zeroed
  /// partial of each leaf. Collective.
  template <class AddRows>
  void sum(std::span<float> result, AddRows&& add_rows) {
    cpattn::OrderedSum<float> ordered(num_leaves_, static_cast<std::int64_t>(result.size()));
    std::vector<float> partial(result.size());
    for (const cpattn::LeafRows& leaf : leaves_) {
      partial.assign(partial.size(), 0.0f);
      add_rows(leaf, partial);
      ordered.add(leaf.leaf, partial);
    }
    ordered.all_reduce(group_, result, cpattn::deadline_after(timeout_));
  }

 private:
  cpattn::Communicator& group_;
  std::vector<cpattn::LeafRows> leaves_;
  std::int64_t num_leaves_;
  cpattn::Seconds timeout_;
};

/// y = x W, W [in, out].
class Linear {
 public:
  Linear(const std::string& name, std::int64_t in, std::int64_t out);
  Matrix forward(const Matrix& x) const;
  /// dx; the gradient of W is summed over all ranks.
  Matrix backward(const Matrix& x, const Matrix& dy, TokenSums& sums);
  Parameter weight;

 private:
  std::int64_t in_, out_;
};

/// y = x / rms(x) * g (Zhang, Sennrich 2019).
class RmsNorm {
 public:
  RmsNorm(const std::string& name, std::int64_t width);
  Matrix forward(const Matrix& x) const;
  Matrix backward(const Matrix& x, const Matrix& dy, TokenSums& sums);
  Parameter gain;
};

/// Row t of the result is the row of the table that tokens[t] names.
class Embedding {
 public:
  Embedding(const std::string& name, std::int64_t vocabulary, std::int64_t width);
  Matrix forward(const std::vector<std::int64_t>& tokens) const;
  void backward(const std::vector<std::int64_t>& tokens, const Matrix& dy, TokenSums& sums);
  Parameter table;

 private:
  std::int64_t width_;
};

/// Rotates pairs (i, i + D/2) of every head by position * 10000^(-2i/D) (Su et al. 2021);
/// `direction` -1 undoes it, which is its backward. Positions count inside each document.
void rotate(Matrix& x, std::int64_t head_dim, const std::vector<std::int64_t>& positions,
            int direction);

/// silu(gate) * up, element by element (Shazeer 2020), and its backward.
Matrix swiglu(const Matrix& gate, const Matrix& up);
void swiglu_backward(const Matrix& gate, const Matrix& up, const Matrix& dy, Matrix& dgate,
                     Matrix& dup);

/// Mean cross-entropy over all tokens of all ranks that have a target (>= 0), and the gradient of
/// the logits. Collective.
struct Loss {
  float value = 0.0f;
  Matrix dlogits;
};
Loss cross_entropy(const Matrix& logits, const std::vector<std::int64_t>& targets, TokenSums& sums);

}  // namespace trainer
