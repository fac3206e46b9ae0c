// ShardRows: a rank's rows of a whole tensor, and back, in the memory of any device.
//
//   const ShardRows rows(planned->plan().shard().q, backend->kernels(gpu), *gpu);
//   rows.shard(q_global, q_local, stream);  // [T, Hq, D] -> [local, Hq, D]
#pragma once

#include <cstdint>
#include <vector>

#include "cp/sharding.h"
#include "kernels/kernel_table.h"
#include "src/base/tensor_view.h"
#include "src/device/device.h"
#include "src/device/memory.h"

namespace cpattn {

/// What shard_rows() and unshard_rows() are on the host (cp/shard_tools.h), put into a stream.
/// Which rows go where is uploaded once, so that calls can be captured. `kernels` and `device`
/// outlive it.
class ShardRows {
 public:
  /// `chunks`: Shard::q or Shard::kv; of `device`'s kernels.
  ShardRows(const std::vector<OwnedChunk>& chunks, const KernelTable& kernels, Device& device);

  /// local row i = the i-th owned row of `global`. Shapes [rows, heads, channels]: heads, channels
  /// and dtype are equal, `local` has the owned rows exactly, strides are free but for the last
  /// dimension, which is contiguous.
  ///
  /// Errors  InvalidArgument that names the tensor, before any launch: it does not fit, is of other
  ///         memory than the device's, or the stream is of another device.
  /// Cost    one launch where the heads of a row lie side by side in both tensors, else one a head.
  void shard(const AnyConstTensor& global, const AnyTensor& local, Stream stream = {}) const;

  /// The way back: owned rows of `global` become the rows of `local`; others keep what they have.
  void unshard(const AnyConstTensor& local, const AnyTensor& global, Stream stream = {}) const;

 private:
  void refuse_misfits(const AnyConstTensor& global, const AnyConstTensor& local,
                      Stream stream) const;
  void copy(const AnyConstTensor& from, const AnyTensor& to, const Buffer& ranges,
            Stream stream) const;

  std::vector<OwnedChunk> chunks_;
  const KernelTable& kernels_;
  Device& device_;
  Buffer gather_, scatter_;  // RowRanges: from the whole to the shard, and back
};

}  // namespace cpattn
