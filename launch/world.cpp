#include "launch/world.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "src/base/error.h"
#include "src/comm/loopback_comm.h"
#ifdef CP_WITH_MPI
#include "src/comm/mpi_comm.h"
#endif

namespace cpattn {
namespace {

/// A number mpirun put into the environment; `fallback` when it is not there or not a number.
int environment_number(const char* name, int fallback) {
  const char* text = std::getenv(name);
  if (text == nullptr) return fallback;
  const std::string_view digits(text);
  int value = fallback;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  return error == std::errc{} && end == digits.data() + digits.size() ? value : fallback;
}

int with_loopback(const std::function<int(World&)>& body) {
  int result = 0;
  LoopbackWorld(1).run([&](Communicator& comm) {
    World world{comm};
    result = body(world);
  });
  return result;
}

}  // namespace

int mpirun_world_size() { return environment_number("OMPI_COMM_WORLD_SIZE", 0); }

int mpirun_rank() { return environment_number("OMPI_COMM_WORLD_RANK", 0); }

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (::sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int threads_per_rank(std::int64_t asked, int local_ranks) {
  if (asked > 0) return static_cast<int>(asked);
  return std::max(1, usable_cores() / std::max(1, local_ranks));
}

#ifdef CP_WITH_MPI

bool is_mpi_compiled() { return true; }

std::string mpi_library_version() {
  std::string text(MPI_MAX_LIBRARY_VERSION_STRING, '\0');
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  text.resize(static_cast<std::size_t>(length));
  return text.substr(0, text.find(','));
}

int with_world(std::size_t max_message_bytes, const std::function<int(World&)>& body) {
  const int started = mpirun_world_size();
  if (started == 0) return with_loopback(body);
  MpiSession session(nullptr, nullptr);
  MpiCommunicator comm(MpiOptions{.max_message_bytes = max_message_bytes});
  // Started by the mpirun of another MPI, each process is a world of its own and would do alone
  // what all were asked to do together.
  require<Unsupported>(comm.size() == started, "mpirun started ", started,
                       started == 1 ? " rank" : " ranks", ", but ", mpi_library_version(),
                       " finds ", comm.size(),
                       ": use the mpirun of that MPI ('cpattn doctor' shows the one in PATH); "
                       "outside mpirun, unset OMPI_COMM_WORLD_SIZE");
  World world{comm, comm.node_place().size, comm.node_place().rank};
  return body(world);
}

#else

bool is_mpi_compiled() { return false; }

std::string mpi_library_version() { return "not compiled in"; }

int with_world(std::size_t, const std::function<int(World&)>& body) {
  const int ranks = mpirun_world_size();
  require<Unsupported>(ranks <= 1, "started as one of ", ranks,
                       " ranks, but this build has no MPI: configure with -DCP_WITH_MPI=ON where "
                       "libopenmpi-dev is installed");
  return with_loopback(body);
}

#endif

}  // namespace cpattn
