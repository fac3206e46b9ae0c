// Refusals of the CUDA backend: InvalidArgument, before any launch, for what its kernels would
// misread.
#pragma once

#include "kernels/block_attention.h"

namespace cpattn::cuda {

void check_pack_kv(const PackKvArgs& args);
void check_forward(const ForwardArgs& args);

/// `tensor` is [rows, heads, dim] with contiguous channels.
void check_tensor(const AnyConstTensor& tensor, const char* name, std::int64_t rows,
                  std::int64_t heads, std::int64_t dim);

/// `memory` begins at a multiple of `alignment` bytes.
void check_alignment(const void* memory, const char* name, std::size_t alignment);

}  // namespace cpattn::cuda
