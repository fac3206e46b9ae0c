// World: the composition root of one process. Who the other ranks are and what moves bytes between
// them.
//
// Inside mpirun the ranks are MPI processes; anywhere else the world is this process alone, over
// the loopback transport.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "src/comm/communicator.h"

namespace cpattn {

/// Processes that mpirun started this one with, read from the environment it sets; 0 outside.
int mpirun_world_size();

/// Rank of this process among them, 0 outside.
int mpirun_rank();

/// Cores this process may use (its affinity mask), at least 1.
int usable_cores();

/// Whether this build can talk MPI.
bool is_mpi_compiled();

/// "Open MPI v4.1.4, ..." or "not compiled in".
std::string mpi_library_version();

/// This process among the ranks.
struct World {
  Communicator& comm;
  int local_ranks = 1;  ///< ranks on this host
  int local_rank = 0;   ///< this one among them
};

/// Threads of each rank: as asked, or the cores of the host divided among its ranks, at least 1.
int threads_per_rank(std::int64_t asked, int local_ranks);

/// Makes the world, calls body, and takes the world down.
///
/// When body returns, all ranks leave MPI together; when it throws, nobody waits for anybody.
/// Errors  Unsupported inside mpirun of a build without MPI, or of another MPI; CommError from MPI;
///         what body throws.
int with_world(std::size_t max_message_bytes, const std::function<int(World&)>& body);

}  // namespace cpattn
