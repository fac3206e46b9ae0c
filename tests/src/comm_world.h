// A world of ranks as a test parameter: the same test bodies run on every transport.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "src/base/error.h"
#include "src/comm/communicator.h"

namespace cpattn {

using RankBody = std::function<void(Communicator&)>;

struct CommWorld {
  std::string name;
  int size = 1;
  /// Runs the body on every rank, each with a communicator nobody used before.
  std::function<void(const RankBody&)> run;
  /// The same for bodies after which messages are left that nobody receives.
  std::function<void(const RankBody&)> run_broken;
};

inline void PrintTo(const CommWorld& world, std::ostream* out) { *out << world.name; }

class CommTest : public testing::TestWithParam<CommWorld> {
 protected:
  int size() const { return GetParam().size; }
  void run(const RankBody& body) const { GetParam().run(body); }
  void run_broken(const RankBody& body) const { GetParam().run_broken(body); }
};

inline std::string world_name(const testing::TestParamInfo<CommWorld>& info) {
  return info.param.name;
}

/// Longer than any wait that succeeds, even on a busy machine.
inline Clock::time_point soon() { return deadline_after(Seconds(60)); }

/// Bytes that tell sender, message and place apart.
inline std::vector<std::byte> pattern(int sender, int message, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((sender * 151 + message * 31 + i * 7 + i / 251) & 0xff);
  return bytes;
}

/// The text of the Exception that `body` throws, or "" (and a failure) when it throws none.
template <class Exception, class Body>
std::string text_thrown_by(Body&& body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

}  // namespace cpattn
