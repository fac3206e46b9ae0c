// Refusals of the backward of the CUDA backend: InvalidArgument, before any launch, for what its
// kernels would misread.
#pragma once

#include "kernels/block_gradient.h"

namespace cpattn::cuda {

void check_pack_queries(const PackQueriesArgs& args);
void check_backward(const BackwardArgs& args);
void check_sum_dkv(const SumDkvArgs& args);

}  // namespace cpattn::cuda
