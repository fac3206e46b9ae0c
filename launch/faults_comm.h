// Communicators that a fault puts in place of a rank's own: they forward everything and spoil one
// thing.
#pragma once

#include <memory>

#include "src/comm/communicator.h"

namespace cpattn {

/// At its first message of the ring it ends the process, with exit code 0 and without a word, or
/// (`ends` false) sleeps for ever.
std::unique_ptr<Communicator> make_leaving(Communicator& comm, bool ends);

/// Rounds every f32 of dk, dv pieces to bf16 as they arrive from another rank, and adds their
/// number to `sites`, which must outlive it.
std::unique_ptr<Communicator> make_rounding(Communicator& comm, std::int64_t& sites);

}  // namespace cpattn
