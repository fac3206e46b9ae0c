#include "src/comm/max_over_ranks.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// One NaN for all, so that equal bits do not depend on whose it was.
float larger(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

constexpr std::string_view kWhat = "max_over_ranks";

}  // namespace

void max_over_ranks(Communicator& comm, std::span<float> values, Clock::time_point deadline) {
  const auto all = comm.all_gather(std::as_bytes(values), deadline, kWhat);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    require(all[rank].size() == all[0].size(), "max_over_ranks: rank ", rank, " has ",
            all[rank].size() / sizeof(float), " values, expected ", all[0].size() / sizeof(float),
            " as rank 0 has");
  }
  for (float& value : values) value = larger(value, value);
  for (const std::vector<std::byte>& bytes : all) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      float theirs;
      std::memcpy(&theirs, bytes.data() + i * sizeof(float), sizeof(float));
      values[i] = larger(values[i], theirs);
    }
  }
}

void max_over_ranks(ShardTransport& group, std::span<float> values, Stream stream,
                    Clock::time_point deadline) {
  Device& device = group.device();
  const int rank = group.control().rank();
  require(!device.is_capturing(stream), "rank ", rank,
          ": stream: in capture, expected one whose work runs");
  std::string problem = device.problem_with(stream);
  std::string place = values.empty() ? "" : device.problem_with(values.data());
  if (!values.empty() && values.data() == nullptr) place = "null";
  if (!place.empty()) problem += detail::concat(problem.empty() ? "" : "; ", "values: ", place);
  refuse_together(group.control(), problem, deadline, kWhat);
  group.synchronize(stream, deadline);
  auto* const there = reinterpret_cast<std::byte*>(values.data());
  std::vector<float> here(values.size());
  device.download(std::as_writable_bytes(std::span(here)), there);
  max_over_ranks(group.control(), here, deadline);
  device.upload(there, std::as_bytes(std::span(here)));
}

void refuse_max_over_ranks(Communicator& comm, std::string_view why, Clock::time_point deadline) {
  refuse_together(comm, why.empty() ? "refused" : why, deadline, kWhat);
}

}  // namespace cpattn
