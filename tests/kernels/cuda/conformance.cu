#include "tests/kernels/cuda/conformance.cuh"

#include <iterator>

#include "tests/kernels/cuda/conformance.h"
#include "tests/kernels/cuda/conformance_buffer.h"

namespace cpattn::cuda {
namespace {

/// What rounding has to decide: ties, denormals, overflow, infinities, NaN.
constexpr std::uint32_t kRoundingCases[32] = {
    0x00000000, 0x80000000, 0x3f800000, 0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0xbf808000,
    0x3f801000, 0x3f803000, 0x3f800fff, 0x3f801001, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000,
    0x33000000, 0x33000001, 0x33800000, 0x33c00000, 0x387fc000, 0x387fe000, 0x38800000, 0xb8800001,
    0x7f7fffff, 0x7f7f8000, 0x7f7f7fff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0x00000001};

}  // namespace

std::string report_portable(cudaStream_t stream) {
  std::vector<std::uint32_t> source(kNumSourceWords);
  for (std::uint32_t i = 0; i < source.size(); ++i) source[i] = 2 * i | (2 * i + 1) << 16;
  source.insert(source.end(), std::begin(kRoundingCases), std::end(kRoundingCases));
  Words from(std::move(source)), to(32 * kNumPortableResults);
  launch(conformance_kernel, dim3(1), dim3(32), kPortableSharedBytes, stream, from.device(),
         to.device());
  const std::vector<std::uint32_t>& words = to.fetch(stream);
  std::string text;
  for (std::size_t i = 0; i < static_cast<std::size_t>(kNumPortableResults); ++i) {
    text += std::string(kPortableResults[i]) + ":";
    for (std::size_t lane = 0; lane < 32; ++lane) text += hex(words[32 * i + lane], 8);
    text += "\n";
  }
  return text;
}

}  // namespace cpattn::cuda
