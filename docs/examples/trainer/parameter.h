// A trained matrix or vector, replicated on every rank, and the sum of its gradient over tokens.
//
// The gradient of a weight is a sum over all tokens of the batch. Added up rank by rank, its bits
// would depend on how many ranks there are. Here every chunk of the sequence gives one partial (a
// leaf), and cpattn::OrderedSum adds the leaves along a tree that depends on the number of chunks
// only.
#pragma once

#include <cpattn/ordered_sum.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace trainer {

class Parameter {
 public:
  /// `scale` times numbers in [-1, 1) that depend on the name and the place only.
  Parameter(const std::string& name, std::size_t size, float scale, float offset = 0.0f)
      : value(size), gradient(size), first_moment_(size), second_moment_(size) {
    std::uint64_t state = 0x9e3779b97f4a7c15ull;
    for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
    for (float& x : value) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      x = offset + scale * (static_cast<float>(state >> 40) * 0x1p-23f - 1.0f);
    }
  }

  /// Adam (Kingma, Ba 2015) with bias correction; `step` counts from 1. The same on every rank,
  /// because the gradient is.
  void update(int step, float learning_rate) {
    constexpr float kBeta1 = 0.9f, kBeta2 = 0.99f, kEpsilon = 1e-8f;
    const float correction1 = 1.0f - std::pow(kBeta1, static_cast<float>(step));
    const float correction2 = 1.0f - std::pow(kBeta2, static_cast<float>(step));
    for (std::size_t i = 0; i < value.size(); ++i) {
      const float g = gradient[i];
      first_moment_[i] = kBeta1 * first_moment_[i] + (1.0f - kBeta1) * g;
      second_moment_[i] = kBeta2 * second_moment_[i] + (1.0f - kBeta2) * g * g;
      value[i] -= learning_rate * (first_moment_[i] / correction1) /
                  (std::sqrt(second_moment_[i] / correction2) + kEpsilon);
    }
  }

  std::vector<float> value;
  std::vector<float> gradient;

 private:
  std::vector<float> first_moment_, second_moment_;
};

}  // namespace trainer
