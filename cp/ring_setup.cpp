#include "cp/ring_setup.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>

#include "src/base/error.h"

namespace cpattn {
namespace {

/// The check that all ranks make together when a pass begins, by a name that is one only of those
/// that make the same pass of equal plans: "forward of plan 4718f2b7388efda5".
class NameOfCheck {
 public:
  NameOfCheck(const Plan& plan, Pass pass) {
    add(pass == Pass::forward ? "forward of plan " : "backward of plan ");
    end_ = std::to_chars(end_, text_.data() + text_.size(), plan.digest(), 16).ptr;
  }
  operator std::string_view() const {
    return {text_.data(), static_cast<std::size_t>(end_ - text_.data())};
  }

 private:
  void add(std::string_view part) { end_ = std::copy(part.begin(), part.end(), end_); }

  std::array<char, 48> text_;  // no memory is taken in a pass
  char* end_ = text_.data();
};

Clock::time_point check_deadline(const Plan& plan) {
  return deadline_after(Seconds(plan.config().timeout_seconds));
}

}  // namespace

RingOptions ring_options(const Plan& plan) {
  return {.direction = plan.schedule().direction,
          .timeout = Seconds(plan.config().timeout_seconds),
          .verify_checksum = plan.config().verify_checksum,
          .delay_seed = static_cast<std::uint64_t>(plan.config().shuffle_arrival)};
}

std::vector<PackChunk> pack_chunks(const std::vector<OwnedChunk>& own,
                                   const std::vector<std::size_t>& offsets) {
  std::vector<PackChunk> chunks;
  for (std::size_t i = 0; i < own.size(); ++i)
    chunks.push_back({own[i].local_begin, own[i].num_tokens, offsets[i]});
  return chunks;
}

ShardTransport& agreed(const Plan& plan, std::string_view lines, ShardTransport& transport) {
  Communicator& comm = transport.control();
  require(plan.rank() == comm.rank() && plan.world_size() == comm.size(), "plan of rank ",
          plan.rank(), " of ", plan.world_size(), " on a communicator where this is rank ",
          comm.rank(), " of ", comm.size());
  const DeviceKind kernels = plan.kernels().device, shards = transport.device().kind();
  const std::string mismatch =
      kernels == shards
          ? ""
          : detail::concat("kernels ", plan.kernels().name, " for ", name_of(kernels),
                           ", expected kernels for ", name_of(shards), ", where transport ",
                           transport.transport(), " has its shards");
  const auto deadline = deadline_after(Seconds(plan.config().timeout_seconds));
  refuse_together(comm, mismatch, deadline, "device check");
  agree(comm, lines, deadline);
  return transport;
}

void refuse_tensors_together(const Plan& plan, Pass pass, ShardTransport& transport,
                             std::string_view mine, Stream stream) {
  Communicator& comm = transport.control();
  const Device& device = transport.device();
  std::string refusal(mine);
  if (const std::string problem = device.problem_with(stream); !problem.empty())
    refusal += (refusal.empty() ? "" : "; ") + problem;
  if (!device.is_capturing(stream))
    return refuse_together(comm, refusal, check_deadline(plan), NameOfCheck(plan, pass));
  if (!transport.can_capture()) {
    refusal += detail::concat(refusal.empty() ? "" : "; ",
                              "stream: in capture, expected none: ", "transport ",
                              transport.transport(), " moves bytes by the host");
  }
  require(refusal.empty(), "rank ", comm.rank(), ": ", refusal);
}

void refuse_call(const Plan& plan, Pass pass, ShardTransport& transport, std::string_view why,
                 Stream stream) {
  Communicator& comm = transport.control();
  if (!transport.device().is_capturing(stream))
    refuse_together(comm, why, check_deadline(plan), NameOfCheck(plan, pass));
  throw InvalidArgument(detail::concat("rank ", comm.rank(), ": ", why));
}

}  // namespace cpattn
