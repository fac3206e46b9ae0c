#include "launch/doctor.h"

#include <fmt/format.h>

#include <iostream>
#include <nlohmann/json.hpp>

namespace cpattn {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Shared-memory segments Open MPI makes per rank on one host, with room for four ranks.
constexpr std::uint64_t kLeastSharedMemory = 64 * kMiB;

std::string gibibytes(std::uint64_t bytes) {
  return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0));
}

Finding open_mpi(const MachineFacts& facts) {
  const std::string install = "apt-get install openmpi-bin libopenmpi-dev";
  if (facts.mpirun_version.empty()) {
    return {FindingKind::missing, "Open MPI", "no mpirun on PATH", install};
  }
  if (facts.mpirun_version.find("Open MPI") == std::string::npos) {
    return {FindingKind::missing, "Open MPI",
            fmt::format("mpirun is another MPI: {}", facts.mpirun_version), install};
  }
  if (!facts.is_built_with_mpi) {
    return {FindingKind::missing, "Open MPI",
            facts.mpirun_version + ", but this cpattn was built without MPI",
            install + ", then configure again with -DCP_WITH_MPI=ON"};
  }
  return {FindingKind::ok, "Open MPI", facts.mpirun_version, ""};
}

Finding cores(const MachineFacts& facts) {
  const std::string quota =
      facts.core_quota > 0.0 ? fmt::format(", cgroup quota of {:.1f} cores' time", facts.core_quota)
                             : "";
  const std::string found =
      fmt::format("{} usable of {}{}; sizes above {} share cores: correct, not faster",
                  facts.usable_cores, facts.online_cores, quota, facts.usable_cores);
  const bool has_all = facts.usable_cores >= facts.online_cores;
  const bool has_quota = facts.core_quota > 0.0 && facts.core_quota < facts.usable_cores;
  if (has_all && !has_quota) return {FindingKind::ok, "cores", found, ""};
  return {FindingKind::limited, "cores", found,
          "a wider cpuset or quota (docker: --cpuset-cpus, --cpus) gives more"};
}

Finding single_copy(const MachineFacts& facts) {
  if (facts.single_copy_error.empty()) {
    return {FindingKind::ok, "single copy", "ranks may read each other's memory (CMA)", ""};
  }
  return {FindingKind::limited, "single copy",
          fmt::format("ranks may not read each other's memory ({}): messages are copied twice",
                      facts.single_copy_error),
          "docker: --cap-add SYS_PTRACE; else sysctl kernel.yama.ptrace_scope=0"};
}

Finding kernels(const MachineFacts& facts) {
  std::string names;
  for (const std::string& name : facts.kernels) names += (names.empty() ? "" : ", ") + name;
  if (facts.kernels.empty()) {
    return {FindingKind::missing, "CPU kernels", "none", "build cpattn for this processor"};
  }
  return {FindingKind::ok, "CPU kernels",
          fmt::format("{}; --isa auto takes {}", names, facts.kernels.back()), ""};
}

Finding threads(const MachineFacts& facts) {
  if (facts.is_built_with_openmp) {
    return {FindingKind::ok, "threads", "built with OpenMP: --threads per rank", ""};
  }
  return {FindingKind::limited, "threads", "built without OpenMP: one thread per rank",
          "configure again with a compiler that has -fopenmp (g++)"};
}

Finding memory(const MachineFacts& facts) {
  const std::string limit =
      facts.memory_limit > 0 ? ", cgroup limit " + gibibytes(facts.memory_limit) : "";
  return {FindingKind::ok, "memory",
          fmt::format("{} available of {}{}", gibibytes(facts.memory_available),
                      gibibytes(facts.memory_total), limit),
          ""};
}

Finding shared_memory(const MachineFacts& facts) {
  const std::string found = fmt::format("{} MiB free in /dev/shm", facts.shared_memory_free / kMiB);
  if (facts.shared_memory_free >= kLeastSharedMemory) {
    return {FindingKind::ok, "shared memory", found, ""};
  }
  return {FindingKind::limited, "shared memory", found,
          "Open MPI keeps its queues there; docker: --shm-size=1g"};
}

/// Accelerators: reported because people ask, never needed.
void add_accelerators(const MachineFacts& facts, std::vector<Finding>& findings) {
  const std::string no_use = "nothing to do: no command of this version uses CUDA";
  const auto add = [&](std::string part, bool is_there, std::string found) {
    findings.push_back({FindingKind::unused, std::move(part),
                        is_there ? std::move(found) : std::string("not found"),
                        is_there ? "" : no_use});
  };
  add("CUDA toolkit", !facts.cuda_toolkit.empty(), facts.cuda_toolkit);
  add("CUDA driver", facts.has_cuda_driver, "libcuda.so.1 loads");
  add("GPU", !facts.gpus.empty(),
      fmt::format("{}, first: {}", facts.gpus.size(), facts.gpus.empty() ? "" : facts.gpus[0]));
  add("NCCL", facts.has_nccl, "libnccl.so.2 loads");
  const bool is_aware = facts.is_mpi_cuda_aware.value_or(false);
  findings.push_back({FindingKind::unused, "CUDA-aware MPI",
                      !facts.is_mpi_cuda_aware ? "ompi_info does not say"
                      : is_aware               ? "yes"
                                               : "no",
                      is_aware ? "" : no_use});
}

}  // namespace

Diagnosis diagnose(const MachineFacts& facts) {
  Diagnosis diagnosis;
  const Finding mpi = open_mpi(facts);
  const Finding cpu = kernels(facts);
  diagnosis.findings = {mpi, cores(facts), single_copy(facts)};
  if (facts.is_root) {
    diagnosis.findings.push_back(
        {FindingKind::ok, "user", "root: cpattn tells mpirun that this is meant", ""});
  }
  for (const Finding& finding : {cpu, threads(facts), memory(facts), shared_memory(facts)}) {
    diagnosis.findings.push_back(finding);
  }
  add_accelerators(facts, diagnosis.findings);

  const bool has_mpi = mpi.kind == FindingKind::ok;
  const bool has_kernels = cpu.kind == FindingKind::ok;
  diagnosis.can_run_parity = has_mpi && has_kernels;
  diagnosis.abilities = {
      {"plan, any size", has_kernels, has_kernels ? "needs nothing else" : "no kernels"},
      {"CPU parity, one rank", diagnosis.can_run_parity,
       diagnosis.can_run_parity ? "with " + facts.kernels.back() : "see what is missing"},
      {"CPU parity, several ranks over MPI", diagnosis.can_run_parity,
       diagnosis.can_run_parity
           ? fmt::format("any size; up to {} without sharing cores", facts.usable_cores)
           : "see what is missing"},
      {"GPU, NCCL, CUDA-aware MPI", false, "no command of this version uses CUDA: CPU only"},
  };
  return diagnosis;
}

std::string to_text(const Diagnosis& diagnosis) {
  std::string text = "This machine\n";
  for (const Finding& finding : diagnosis.findings) {
    text += fmt::format("  {:<8} {:<15} {}\n", name_of(finding.kind), finding.part, finding.found);
    if (!finding.remedy.empty()) text += fmt::format("  {:<24} -> {}\n", "", finding.remedy);
  }
  text += "\nWhat works\n";
  for (const Ability& ability : diagnosis.abilities) {
    text +=
        fmt::format("  {:<3} {:<35} {}\n", ability.works ? "yes" : "no", ability.what, ability.why);
  }
  return text;
}

std::string to_json(const Diagnosis& diagnosis) {
  nlohmann::ordered_json json;
  json["can_run_parity"] = diagnosis.can_run_parity;
  json["findings"] = nlohmann::ordered_json::array();
  for (const Finding& finding : diagnosis.findings) {
    json["findings"].push_back({{"kind", name_of(finding.kind)},
                                {"part", finding.part},
                                {"found", finding.found},
                                {"remedy", finding.remedy}});
  }
  json["abilities"] = nlohmann::ordered_json::array();
  for (const Ability& ability : diagnosis.abilities) {
    json["abilities"].push_back(
        {{"what", ability.what}, {"works", ability.works}, {"why", ability.why}});
  }
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

Subcommand doctor_subcommand() {
  return {"doctor",
          "says what this machine has and what will therefore work",
          "cpattn doctor",
          kNoKnobs,
          {{"json", "", "prints JSON"}},
          run_doctor};
}

int run_doctor(const RunConfig&, const CommandLine& line) {
  const Diagnosis diagnosis = diagnose(examine_machine());
  std::cout << (line.has("json") ? to_json(diagnosis) : to_text(diagnosis));
  return static_cast<int>(diagnosis.can_run_parity ? ExitCode::pass : ExitCode::unavailable);
}

}  // namespace cpattn
