#include "launch/mpirun.h"

#include <unistd.h>

#include <cstdlib>
#include <regex>
#include <sstream>

#include "launch/world.h"

namespace cpattn {

LaunchFacts launch_facts() {
  const char* path = std::getenv("PATH");
  const int cores = usable_cores();
  return {cores, cores == ::sysconf(_SC_NPROCESSORS_ONLN), ::geteuid() == 0, is_mpi_compiled(),
          find_in_path("mpirun", path == nullptr ? "/usr/bin:/bin" : path)};
}

std::string why_no_mpirun(const LaunchFacts& facts) {
  if (!facts.has_mpi) {
    return "this build has no MPI: install libopenmpi-dev and configure with -DCP_WITH_MPI=ON "
           "(./launch/quickstart.sh does both), or ask for --cp 1";
  }
  if (facts.mpirun.empty()) {
    return "mpirun is not in PATH: install openmpi-bin (apt-get install openmpi-bin), or ask for "
           "--cp 1";
  }
  return "";
}

ProcessSpec mpirun_process(const LaunchFacts& facts, int ranks, int threads,
                           const std::vector<std::string>& program) {
  ProcessSpec spec;
  std::vector<std::string>& arguments = spec.arguments;
  arguments = {facts.mpirun, "-np", std::to_string(ranks), "--oversubscribe"};
  const auto add = [&](std::initializer_list<const char*> words) {
    arguments.insert(arguments.end(), words.begin(), words.end());
  };
  if (threads == 1 && ranks <= facts.cores && facts.has_all_cores) {
    add({"--bind-to", "core:if-supported", "--map-by", "core"});
  } else {
    add({"--bind-to", "none"});
  }
  add({"--mca", "plm", "isolated", "--mca", "ras", "^slurm,gridengine,tm,lsf,alps"});
  add({"--mca", "pml", "ob1", "--mca", "btl", "vader,self"});
  add({"--mca", "btl_vader_single_copy_mechanism", "none"});
  if (ranks * threads >= facts.cores) add({"--mca", "mpi_yield_when_idle", "1"});
  add({"-x", "OMP_NUM_THREADS"});
  arguments.insert(arguments.end(), program.begin(), program.end());

  spec.environment.emplace_back("OMP_NUM_THREADS", std::to_string(threads));
  if (facts.is_root) {  // mpirun refuses root unless both say that this is meant
    spec.environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT", "1");
    spec.environment.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
  }
  return spec;
}

std::string find_in_path(const std::string& name, const std::string& path) {
  std::istringstream directories(path);
  std::string directory;
  while (std::getline(directories, directory, ':')) {
    const std::string candidate = (directory.empty() ? "." : directory) + "/" + name;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

std::optional<DeathNotice> find_death_notice(const std::string& output) {
  // mpirun breaks its lines where it likes.
  const std::regex by_signal(
      "process rank (\\d+) with PID \\d+ on\\s+node \\S+\\s+(exited on signal \\d+ \\([^)]*\\))");
  const std::regex without_finalize(
      "process rank (\\d+) with PID \\d+ on\\s+node \\S+ exiting improperly");
  std::smatch match;
  if (std::regex_search(output, match, by_signal))
    return DeathNotice{std::stoi(match[1]), match[2]};
  if (std::regex_search(output, match, without_finalize)) {
    return DeathNotice{std::stoi(match[1]), "exited without MPI_Finalize"};
  }
  return std::nullopt;
}

}  // namespace cpattn
