// Refusals that the backward kernels of all backends have in common: InvalidArgument, before any
// work, for arguments that contradict each other.
#pragma once

#include "kernels/block_gradient.h"

namespace cpattn {

void check_pack_queries(const PackQueriesArgs& args);
void check_backward(const BackwardArgs& args);
void check_sum_dkv(const SumDkvArgs& args);

}  // namespace cpattn
