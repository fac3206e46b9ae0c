#include "src/comm/max_over_ranks.h"

#include <cmath>
#include <cstring>
#include <limits>
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

}  // namespace

void max_over_ranks(Communicator& comm, std::span<float> values, Clock::time_point deadline) {
  const auto all = comm.all_gather(std::as_bytes(values), deadline, "max_over_ranks");
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

}  // namespace cpattn
