// What every PTX wrapper gives on inputs whose results are exact, as text.
//
// The host's text is tests/goldens/cuda_conformance.txt; a device's must be the same, word for
// word. That is what stands behind the layouts which the host layer shares with the kernels: both
// could be wrong in the same way, and only a device can tell.
#pragma once

#include <string>

#include "kernels/cuda/compat.h"

namespace cpattn::cuda {

/// The portable path (sm_80 and later).
std::string report_portable(cudaStream_t stream);

/// The Hopper path (sm_90a). Large results are given as four digests of a quarter each; with_words:
/// the words as well.
std::string report_sm90(cudaStream_t stream, bool with_words);

}  // namespace cpattn::cuda
