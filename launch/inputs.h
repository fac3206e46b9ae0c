// Inputs: q, k, v and the incoming gradients dout, dlse of a run, readable in any slice on any
// rank: made from a seed, or mapped from a tensor file.
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

enum class TensorRole { q, k, v, dout, dlse };

template <>
struct EnumNames<TensorRole> {
  static constexpr std::array kValues{
      NamedValue<TensorRole>{TensorRole::q, "q"}, NamedValue<TensorRole>{TensorRole::k, "k"},
      NamedValue<TensorRole>{TensorRole::v, "v"}, NamedValue<TensorRole>{TensorRole::dout, "dout"},
      NamedValue<TensorRole>{TensorRole::dlse, "dlse"}};
};

/// What the elements of q, k, v are; D is the head_dim, every choice exact in f16 and bf16 is
/// named. dout and dlse are normal in all of them: a gradient of ones hides what is mixed up.
///
/// normal            independent, mean 0, variance 1.
/// all_equal         q, k are +-1 and every key of a kv head is the same, so that q.k is one
/// integer
///                   for all keys of a (row, head): out is the mean of the visible v and lse =
///                   logit + log(keys). v normal: a lost key shows.
/// outlier_channels  normal, with one channel in 32 (at least one) of each tensor and head larger
/// by
///                   a factor between 30 and 100, the same channels in every row.
/// large_logits      q, k normal times 50: scaled logits of standard deviation 2500, +-1e4 at four.
/// one_hot           every row of q, k is 32 in one channel, else 0 (exact): a scaled logit is 0 or
///                   1024 / sqrt(D), and about one key in D takes all the weight. v normal.
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
  /// once to dst.dtype; dout has the heads of q and the dim of v, dlse the heads of q and dim 1.
  /// Touches only these rows. InvalidArgument when rows or shape do not fit the tensor.
  virtual void read(TensorRole role, std::int64_t row_begin, const AnyTensor& dst) const = 0;
};

struct SyntheticSpec {
  Distribution distribution = Distribution::normal;
  std::uint64_t seed = 1;
  AttentionShape shape;  ///< its softmax_scale is ignored, see InputInfo
  SequenceBatch batch;
};

/// Every element is a pure function of (seed, role, global row, head, channel), the same on every
/// machine and rank. All tensors are independent; the batch and the number of rows do not change an
/// element. InvalidArgument for a shape or batch that does not validate. Cost: memory O(heads *
/// head_dim), time O(elements read).
std::unique_ptr<InputSource> make_synthetic(const SyntheticSpec& spec);

/// Opens a safetensors file: q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] in F32, F16 or BF16,
/// optional cu_seqlens and cu_seqlens_kv (I32 or I64), optional dout [T, Hq, Dv] and dlse [T, Hq]
/// (as made from seed 1 when they are not there), either under these names or as "<prefix>.q" ...;
/// one source per prefix, in file order of the names. `only` (a prefix) picks one; empty takes all.
/// A prefix without its own cu_seqlens takes the file's, if there is one; else it is one document.
/// Tensors of other names are left alone. The file is mapped, rows are read on demand.
/// InvalidArgument names the file, the tensor and what was expected for anything malformed,
/// truncated or hostile.
std::vector<std::unique_ptr<InputSource>> open_tensor_file(const std::string& path,
                                                           const std::string& only);

}  // namespace cpattn
