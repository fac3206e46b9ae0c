#include "layers.h"

#include <algorithm>
#include <cmath>

namespace trainer {

void add(Matrix& to, const Matrix& from) {
  for (std::size_t i = 0; i < to.data.size(); ++i) to.data[i] += from.data[i];
}

TokenSums::TokenSums(cpattn::Communicator& group, std::vector<cpattn::LeafRows> leaves,
                     std::int64_t num_leaves, double timeout_seconds)
    : group_(group),
      leaves_(std::move(leaves)),
      num_leaves_(num_leaves),
      timeout_(timeout_seconds) {}

Linear::Linear(const std::string& name, std::int64_t in, std::int64_t out)
    : weight(name, static_cast<std::size_t>(in * out), std::sqrt(3.0f / static_cast<float>(in))),
      in_(in),
      out_(out) {}

Matrix Linear::forward(const Matrix& x) const {
  Matrix y(x.rows, out_);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    float* to = y.row(r);
    for (std::int64_t i = 0; i < in_; ++i) {
      const float value = x.row(r)[i];
      const float* w = weight.value.data() + i * out_;
      for (std::int64_t o = 0; o < out_; ++o) to[o] += value * w[o];
    }
  }
  return y;
}

Matrix Linear::backward(const Matrix& x, const Matrix& dy, TokenSums& sums) {
  sums.sum(weight.gradient, [&](const cpattn::LeafRows& leaf, std::span<float> partial) {
    for (std::int64_t r = leaf.begin; r < leaf.begin + leaf.num_rows; ++r) {
      const float* from = dy.row(r);
      for (std::int64_t i = 0; i < in_; ++i) {
        const float value = x.row(r)[i];
        float* to = partial.data() + i * out_;
        for (std::int64_t o = 0; o < out_; ++o) to[o] += value * from[o];
      }
    }
  });
  std::vector<float> transposed(weight.value.size());
  for (std::int64_t i = 0; i < in_; ++i) {
    for (std::int64_t o = 0; o < out_; ++o) {
      transposed[static_cast<std::size_t>(o * in_ + i)] =
          weight.value[static_cast<std::size_t>(i * out_ + o)];
    }
  }
  Matrix dx(x.rows, in_);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    float* to = dx.row(r);
    for (std::int64_t o = 0; o < out_; ++o) {
      const float value = dy.row(r)[o];
      const float* w = transposed.data() + o * in_;
      for (std::int64_t i = 0; i < in_; ++i) to[i] += value * w[i];
    }
  }
  return dx;
}

namespace {

float inverse_rms(const float* x, std::int64_t width) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(width) + 1e-5f);
}

}  // namespace

RmsNorm::RmsNorm(const std::string& name, std::int64_t width)
    : gain(name, static_cast<std::size_t>(width), 0.0f, 1.0f) {}

Matrix RmsNorm::forward(const Matrix& x) const {
  Matrix y(x.rows, x.width);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    const float inverse = inverse_rms(x.row(r), x.width);
    for (std::int64_t i = 0; i < x.width; ++i) {
      y.row(r)[i] = x.row(r)[i] * inverse * gain.value[static_cast<std::size_t>(i)];
    }
  }
  return y;
}

Matrix RmsNorm::backward(const Matrix& x, const Matrix& dy, TokenSums& sums) {
  sums.sum(gain.gradient, [&](const cpattn::LeafRows& leaf, std::span<float> partial) {
    for (std::int64_t r = leaf.begin; r < leaf.begin + leaf.num_rows; ++r) {
      const float inverse = inverse_rms(x.row(r), x.width);
      for (std::int64_t i = 0; i < x.width; ++i) {
        partial[static_cast<std::size_t>(i)] += dy.row(r)[i] * x.row(r)[i] * inverse;
      }
    }
  });
  Matrix dx(x.rows, x.width);
  for (std::int64_t r = 0; r < x.rows; ++r) {
    const float inverse = inverse_rms(x.row(r), x.width);
    float dot = 0.0f;
    for (std::int64_t i = 0; i < x.width; ++i) {
      dot += dy.row(r)[i] * gain.value[static_cast<std::size_t>(i)] * x.row(r)[i];
    }
    const float back = dot * inverse * inverse / static_cast<float>(x.width);
    for (std::int64_t i = 0; i < x.width; ++i) {
      dx.row(r)[i] =
          inverse * (dy.row(r)[i] * gain.value[static_cast<std::size_t>(i)] - x.row(r)[i] * back);
    }
  }
  return dx;
}

Embedding::Embedding(const std::string& name, std::int64_t vocabulary, std::int64_t width)
    : table(name, static_cast<std::size_t>(vocabulary * width), 1.0f), width_(width) {}

Matrix Embedding::forward(const std::vector<std::int64_t>& tokens) const {
  Matrix y(static_cast<std::int64_t>(tokens.size()), width_);
  for (std::size_t t = 0; t < tokens.size(); ++t) {
    std::copy_n(table.value.begin() + tokens[t] * width_, width_,
                y.row(static_cast<std::int64_t>(t)));
  }
  return y;
}

void Embedding::backward(const std::vector<std::int64_t>& tokens, const Matrix& dy,
                         TokenSums& sums) {
  sums.sum(table.gradient, [&](const cpattn::LeafRows& leaf, std::span<float> partial) {
    for (std::int64_t r = leaf.begin; r < leaf.begin + leaf.num_rows; ++r) {
      float* to = partial.data() + tokens[static_cast<std::size_t>(r)] * width_;
      for (std::int64_t i = 0; i < width_; ++i) to[i] += dy.row(r)[i];
    }
  });
}

void rotate(Matrix& x, std::int64_t head_dim, const std::vector<std::int64_t>& positions,
            int direction) {
  const std::int64_t half = head_dim / 2;
  for (std::int64_t r = 0; r < x.rows; ++r) {
    for (std::int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      const double angle =
          static_cast<double>(positions[static_cast<std::size_t>(r)]) * frequency * direction;
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      for (std::int64_t head = 0; head < x.width; head += head_dim) {
        float& a = x.row(r)[head + i];
        float& b = x.row(r)[head + half + i];
        const float rotated = a * c - b * s;
        b = a * s + b * c;
        a = rotated;
      }
    }
  }
}

Matrix swiglu(const Matrix& gate, const Matrix& up) {
  Matrix y(gate.rows, gate.width);
  for (std::size_t i = 0; i < y.data.size(); ++i) {
    y.data[i] = gate.data[i] / (1.0f + std::exp(-gate.data[i])) * up.data[i];
  }
  return y;
}

void swiglu_backward(const Matrix& gate, const Matrix& up, const Matrix& dy, Matrix& dgate,
                     Matrix& dup) {
  dgate = Matrix(gate.rows, gate.width);
  dup = Matrix(gate.rows, gate.width);
  for (std::size_t i = 0; i < dy.data.size(); ++i) {
    const float sigmoid = 1.0f / (1.0f + std::exp(-gate.data[i]));
    const float silu = gate.data[i] * sigmoid;
    dup.data[i] = dy.data[i] * silu;
    dgate.data[i] = dy.data[i] * up.data[i] * (sigmoid + silu * (1.0f - sigmoid));
  }
}

Loss cross_entropy(const Matrix& logits, const std::vector<std::int64_t>& targets,
                   TokenSums& sums) {
  Loss loss{0.0f, Matrix(logits.rows, logits.width)};
  std::vector<float> row_loss(targets.size(), 0.0f);
  for (std::int64_t r = 0; r < logits.rows; ++r) {
    const std::int64_t target = targets[static_cast<std::size_t>(r)];
    if (target < 0) continue;
    const float* x = logits.row(r);
    const float max = *std::max_element(x, x + logits.width);
    float sum = 0.0f;
    for (std::int64_t i = 0; i < logits.width; ++i) sum += std::exp(x[i] - max);
    row_loss[static_cast<std::size_t>(r)] = max + std::log(sum) - x[target];
    for (std::int64_t i = 0; i < logits.width; ++i) {
      loss.dlogits.row(r)[i] = std::exp(x[i] - max) / sum - (i == target ? 1.0f : 0.0f);
    }
  }
  std::vector<float> totals(2);  // loss, tokens with a target
  sums.sum(totals, [&](const cpattn::LeafRows& leaf, std::span<float> partial) {
    for (std::int64_t r = leaf.begin; r < leaf.begin + leaf.num_rows; ++r) {
      partial[0] += row_loss[static_cast<std::size_t>(r)];
      partial[1] += targets[static_cast<std::size_t>(r)] >= 0 ? 1.0f : 0.0f;
    }
  });
  loss.value = totals[0] / totals[1];
  for (float& x : loss.dlogits.data) x /= totals[1];
  return loss;
}

}  // namespace trainer
