// Synthetic inputs. Only integer operations and correctly rounded IEEE ones (int-to-double, *, -,
// sqrt) touch a value, so that every machine makes the same bits; a libm would not promise that.
#include <algorithm>
#include <cmath>  // std::sqrt
#include <vector>

#include "launch/inputs_source.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): element
/// n of the stream of `key` is mix(key + (n + 1) * gamma), so any element is reached directly. The
/// output function is Stafford's variant 13.
constexpr std::uint64_t kGamma = 0x9e3779b97f4a7c15ull;

constexpr std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// Element `index` of the stream of `key`; also the key of a stream below it.
constexpr std::uint64_t draw(std::uint64_t key, std::int64_t index) {
  return mix(key + (static_cast<std::uint64_t>(index) + 1) * kGamma);
}

constexpr std::int64_t popcount(std::uint64_t bits) {
  // In arithmetic, because the instruction is not part of the x86-64 baseline this is compiled for.
  bits -= (bits >> 1) & 0x5555555555555555ull;
  bits = (bits & 0x3333333333333333ull) + ((bits >> 2) & 0x3333333333333333ull);
  bits = (bits + (bits >> 4)) & 0x0f0f0f0f0f0f0f0full;
  return static_cast<std::int64_t>((bits * 0x0101010101010101ull) >> 56);
}

/// A draw close to N(0, 1) from two words, by the central limit theorem: the number of ones among
/// 64 fair bits (variance 64 / 4) plus the difference of two uniforms on [0, 1) (variance 2 / 12),
/// whose triangular density turns the 65 steps into a piecewise linear density. Mean 0 up to 2^-32,
/// variance 1, excess kurtosis -0.031, |x| < 8.3. The sum is an integer multiple of 2^-32 below
/// 2^38, so only the last product and the rounding to f32 are inexact.
float normal_from(std::uint64_t ones, std::uint64_t dither, double scale) {
  const std::int64_t steps = (popcount(ones) - 32) * (std::int64_t{1} << 32);
  const std::int64_t triangle =
      static_cast<std::int64_t>(dither >> 32) - static_cast<std::int64_t>(dither & 0xffffffffu);
  return static_cast<float>(static_cast<double>(steps + triangle) * scale);
}

/// 1 / (2^32 sigma) with sigma^2 = 16 + 1/6.
const double kNormalScale = 0x1p-32 / std::sqrt(97.0 / 6.0);

constexpr float kLargeLogitFactor = 50.0f;  // 50 * 50 = 2500 on a logit
constexpr float kHotValue = 32.0f;
constexpr std::int64_t kChannelsPerOutlier = 32;

/// Streams below the seed; the numbers are part of every synthetic input, so keep them.
enum class Stream : std::int64_t { q = 0, k = 1, v = 2, dout = 3, dlse = 4, outlier = 16 };

Stream stream_of(TensorRole role) {
  switch (role) {
    case TensorRole::q:
      return Stream::q;
    case TensorRole::k:
      return Stream::k;
    case TensorRole::v:
      return Stream::v;
    case TensorRole::dout:
      return Stream::dout;
    case TensorRole::dlse:
      return Stream::dlse;
  }
  return Stream::q;
}

/// Everything that fixes one tensor.
struct Recipe {
  enum class Kind { normal, sign, one_hot };
  Kind kind = Kind::normal;
  bool same_in_every_row = false;
  float factor = 1.0f;
  std::uint64_t key = 0;
  std::vector<float> channel_factors;  ///< [heads, dim], or empty
};

/// Factors between 30 and 100 in dim / 32 channels of every head, 1 elsewhere.
std::vector<float> outlier_factors(std::uint64_t key, std::int64_t heads, std::int64_t dim) {
  std::vector<float> factors(static_cast<std::size_t>(heads * dim), 1.0f);
  const std::int64_t count = std::max<std::int64_t>(1, dim / kChannelsPerOutlier);
  for (std::int64_t head = 0; head < heads; ++head) {
    const std::uint64_t head_key = draw(key, head);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint64_t word = draw(head_key, i);
      const auto channel =
          static_cast<std::int64_t>((word >> 32) % static_cast<std::uint64_t>(dim));
      factors[static_cast<std::size_t>(head * dim + channel)] =
          30.0f + static_cast<float>(word % 71);
    }
  }
  return factors;
}

Recipe recipe_of(const SyntheticSpec& spec, const InputInfo& info, TensorRole role) {
  Recipe recipe;
  const std::uint64_t seed_key = mix(spec.seed + kGamma);
  recipe.key = draw(seed_key, static_cast<std::int64_t>(stream_of(role)));
  if (role == TensorRole::dout || role == TensorRole::dlse) return recipe;
  const bool is_value = role == TensorRole::v;
  switch (spec.distribution) {
    case Distribution::normal:
      break;
    case Distribution::all_equal:
      if (!is_value) recipe.kind = Recipe::Kind::sign;
      recipe.same_in_every_row = role == TensorRole::k;
      break;
    case Distribution::outlier_channels: {
      const auto extent = detail::extent_of(info, role);
      const std::uint64_t key = draw(recipe.key, static_cast<std::int64_t>(Stream::outlier));
      recipe.channel_factors = outlier_factors(key, extent[1], extent[2]);
      break;
    }
    case Distribution::large_logits:
      if (!is_value) recipe.factor = kLargeLogitFactor;
      break;
    case Distribution::one_hot:
      if (!is_value) recipe.kind = Recipe::Kind::one_hot;
      break;
  }
  return recipe;
}

/// The `dim` elements of one (row, head).
void fill(const Recipe& recipe, std::int64_t row, std::int64_t head, std::int64_t dim, float* out) {
  const std::uint64_t key = draw(draw(recipe.key, recipe.same_in_every_row ? 0 : row), head);
  switch (recipe.kind) {
    case Recipe::Kind::normal:
      for (std::int64_t c = 0; c < dim; ++c) {
        out[c] = normal_from(draw(key, 2 * c), draw(key, 2 * c + 1), kNormalScale) * recipe.factor;
      }
      break;
    case Recipe::Kind::sign:
      for (std::int64_t c = 0; c < dim; ++c) out[c] = draw(key, c) >> 63 ? -1.0f : 1.0f;
      break;
    case Recipe::Kind::one_hot:
      std::fill_n(out, dim, 0.0f);
      out[draw(key, 0) % static_cast<std::uint64_t>(dim)] = kHotValue;
      break;
  }
  if (!recipe.channel_factors.empty()) {
    const float* const factors = recipe.channel_factors.data() + head * dim;
    for (std::int64_t c = 0; c < dim; ++c) out[c] *= factors[c];
  }
}

void store(const float* from, std::int64_t dim, void* to, DType dtype) {
  switch (dtype) {
    case DType::f32:
      std::copy_n(from, dim, static_cast<float*>(to));
      return;
    case DType::f16:
      std::transform(from, from + dim, static_cast<f16*>(to), to_f16);
      return;
    case DType::bf16:
      std::transform(from, from + dim, static_cast<bf16*>(to), to_bf16);
      return;
  }
}

class SyntheticSource final : public InputSource {
 public:
  explicit SyntheticSource(const SyntheticSpec& spec)
      : info_{.name = "synthetic/" + std::string(name_of(spec.distribution)),
              .shape = spec.shape,
              .batch = spec.batch} {
    info_.shape.softmax_scale = 1.0;
    validate(info_.shape);
    validate(info_.batch);
    info_.shape.softmax_scale = 1.0 / std::sqrt(static_cast<double>(info_.shape.head_dim));
    for (const auto& role : EnumNames<TensorRole>::kValues) {
      recipes_.push_back(recipe_of(spec, info_, role.value));
    }
  }

  const InputInfo& info() const override { return info_; }

  void read(TensorRole role, std::int64_t row_begin, const AnyTensor& dst) const override {
    detail::check_read(info_, role, row_begin, dst);
    const Recipe& recipe = recipes_[static_cast<std::size_t>(role)];
    std::array<float, kMaxHeadDim> elements;
    for (std::int64_t i = 0; i < dst.shape[0]; ++i) {
      for (std::int64_t head = 0; head < dst.shape[1]; ++head) {
        fill(recipe, row_begin + i, head, dst.shape[2], elements.data());
        store(elements.data(), dst.shape[2], dst.row(i, head), dst.dtype);
      }
    }
  }

 private:
  InputInfo info_;
  std::vector<Recipe> recipes_;  // by TensorRole
};

}  // namespace

std::unique_ptr<InputSource> make_synthetic(const SyntheticSpec& spec) {
  return std::make_unique<SyntheticSource>(spec);
}

}  // namespace cpattn
