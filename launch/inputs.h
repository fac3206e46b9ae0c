// Inputs: q, k, v of a run, readable in any slice on any rank: made from a seed, or mapped from a
// tensor file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/shape.h"
#include "src/base/dtype.h"
#include "src/base/enum_names.h"
#include "src/base/tensor_view.h"

namespace cpattn {

enum class TensorRole { q, k, v };

enum class Distribution { normal, all_equal, outlier_channels, large_logits, one_hot };

template <>
struct EnumNames<Distribution> {
  static constexpr std::array kValues{
      NamedValue<Distribution>{Distribution::normal, "normal"},
      NamedValue<Distribution>{Distribution::all_equal, "all_equal"},
      NamedValue<Distribution>{Distribution::outlier_channels, "outlier_channels"},
      NamedValue<Distribution>{Distribution::large_logits, "large_logits"},
      NamedValue<Distribution>{Distribution::one_hot, "one_hot"}};
};

struct InputInfo {
  std::string name;      ///< "synthetic/normal", "sample.safetensors:layer.0", ...
  AttentionShape shape;  ///< softmax_scale is 1 / sqrt(head_dim)
  SequenceBatch batch;
};

class InputSource {
 public:
  virtual ~InputSource() = default;
  virtual const InputInfo& info() const = 0;

  /// Fills dst [n, heads, dim] with global rows [row_begin, row_begin + n) of the tensor, rounded
  /// once to dst.dtype. Touches only these rows. InvalidArgument when rows or shape do not fit the
  /// tensor.
  virtual void read(TensorRole role, std::int64_t row_begin, const AnyTensor& dst) const = 0;
};

struct SyntheticSpec {
  Distribution distribution = Distribution::normal;
  std::uint64_t seed = 1;
  AttentionShape shape;
  SequenceBatch batch;
};

/// Every element is a pure function of (seed, role, global row, head, channel), the same on every
/// machine and rank.
std::unique_ptr<InputSource> make_synthetic(const SyntheticSpec& spec);

/// Opens a safetensors file: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] in F32, F16 or BF16,
/// optional cu_seqlens (I32 or I64), either under these names or as "<prefix>.q" ...; one source
/// per prefix, in file order of the names. `only` (a prefix) picks one; empty takes all. The file
/// is mapped, rows are read on demand. InvalidArgument names the file, the tensor and what was
/// expected for anything malformed, truncated or hostile.
std::vector<std::unique_ptr<InputSource>> open_tensor_file(const std::string& path,
                                                           const std::string& only);

}  // namespace cpattn
