#include "kernels/cuda/backward_dkv_f32.cuh"

#include <algorithm>

#include "kernels/cuda/backward_f32.h"
#include "kernels/cuda/launch.h"

namespace cpattn::cuda::f32 {
namespace {

/// dk and dv are summed in the same form.
template <class Visit>
auto with_groups_of_both(const AttentionShape& shape, const Visit& visit) {
  return with_groups(std::max(shape.head_dim, shape.value_dim), visit);
}

}  // namespace

int key_tile_size(const AttentionShape& shape) {
  return with_groups_of_both(shape, [](auto groups) { return kTileRows<groups>; });
}

void launch_dkv(const BackwardArgs& args, const BackwardParams& params) {
  const AttentionShape& shape = args.problem.shape;
  with_groups_of_both(shape, [&](auto groups) {
    using C = GradientConfig<groups>;
    const unsigned blocks = num_blocks(args, args.kv_blocks, C::kOwnRows, shape.num_kv_heads,
                                       [](const KvBlock& block) { return block.num_keys; });
    if (blocks == 0) return;
    launch(dkv_kernel<C>, dim3(blocks), dim3(kThreads), kDkvSharedBytes<C>,
           static_cast<cudaStream_t>(args.stream.handle), f32_params(shape, params));
  });
}

LaunchTiles dkv_tiles(const AttentionShape& shape) {
  return with_groups_of_both(shape, [](auto groups) {
    using C = GradientConfig<groups>;
    return LaunchTiles{"dk, dv", C::kOwnRows, static_cast<int>(kQueryTile), kThreads,
                       kDkvSharedBytes<C>};
  });
}

}  // namespace cpattn::cuda::f32
