// How mpirun is called: what this machine allows, and the command line that follows from it.
//
// The flags, and why. --oversubscribe: more ranks than cores are legal, the slot count is not
// raised to get round the check, because then idle ranks would spin. --bind-to none: bound ranks
// would share one core among their threads; only one thread per rank and enough cores are bound,
// and only where nobody has set an affinity of his own, which mpirun would ignore. plm isolated,
// ras without batch systems: this host only, also where a container inherits the variables of a
// Slurm job and lacks its srun, or where there is no ssh. pml ob1, btl vader,self: one host, shared
// memory. btl_vader_single_copy_mechanism none: needs no process_vm_readv, which containers forbid,
// and is faster where the ring polls. mpi_yield_when_idle: a waiting rank leaves the core to one
// that computes.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cpattn {

/// What matters about this machine before ranks are started.
struct LaunchFacts {
  int cores = 1;              ///< this process may use
  bool has_all_cores = true;  ///< no affinity mask keeps it from some of them
  bool is_root = false;       ///< effective user
  bool has_mpi = false;       ///< this build talks MPI
  std::string mpirun;         ///< path; empty when there is none in PATH
};

/// Looks at the machine.
LaunchFacts launch_facts();

/// Empty when ranks can be started; otherwise what is missing and what to do about it.
std::string why_no_mpirun(const LaunchFacts& facts);

/// A process to start: arguments (the first is the program's path) and variables to set.
struct ProcessSpec {
  std::vector<std::string> arguments;
  std::vector<std::pair<std::string, std::string>> environment;
};

/// mpirun with `ranks` processes of `program` (path and arguments), `threads` threads each.
ProcessSpec mpirun_process(const LaunchFacts& facts, int ranks, int threads,
                           const std::vector<std::string>& program);

/// The first executable file `name` in the directories of `path` (as in PATH); empty when none.
std::string find_in_path(const std::string& name, const std::string& path);

/// Who mpirun says ended the job, taken from what it printed.
struct DeathNotice {
  int rank = 0;
  std::string text;  ///< "exited on signal 9 (Killed)"
};
std::optional<DeathNotice> find_death_notice(const std::string& output);

}  // namespace cpattn
