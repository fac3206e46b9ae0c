#include "cp/ring_setup.h"

#include "src/base/error.h"

namespace cpattn {

RingOptions ring_options(const Plan& plan) {
  return {.direction = plan.schedule().direction,
          .timeout = Seconds(plan.config().timeout_seconds),
          .verify_checksum = plan.config().verify_checksum,
          .delay_seed = static_cast<std::uint64_t>(plan.config().shuffle_arrival)};
}

Communicator& agreed(const Plan& plan, std::string_view lines, Communicator& comm) {
  require(plan.rank() == comm.rank() && plan.world_size() == comm.size(), "plan of rank ",
          plan.rank(), " of ", plan.world_size(), " on a communicator where this is rank ",
          comm.rank(), " of ", comm.size());
  agree(comm, lines, deadline_after(Seconds(plan.config().timeout_seconds)));
  return comm;
}

void refuse_tensors_together(const Plan& plan, Communicator& comm, std::string_view mine) {
  refuse_together(comm, mine, deadline_after(Seconds(plan.config().timeout_seconds)),
                  "tensor check");
}

}  // namespace cpattn
