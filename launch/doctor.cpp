#include "launch/doctor.h"

#include <fmt/format.h>

#include <algorithm>
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

std::string gpu_text(const CudaDeviceFacts& gpu) {
  std::string peers;
  for (const int peer : gpu.peers) peers += fmt::format("{}{}", peers.empty() ? "" : ", ", peer);
  return fmt::format("{}: {}, sm_{}{}, {} multiprocessors, {}{}", gpu.ordinal, gpu.name,
                     gpu.compute_major, gpu.compute_minor, gpu.multiprocessors,
                     gibibytes(gpu.memory_bytes),
                     peers.empty() ? "" : ", reaches the memory of " + peers);
}

bool can_run_on_gpu(const MachineFacts& facts) {
  return std::any_of(facts.gpus.begin(), facts.gpus.end(),
                     [](const CudaDeviceFacts& gpu) { return gpu.refusal.empty(); });
}

/// One line for each GPU, or why there is none.
void add_gpus(const MachineFacts& facts, std::vector<Finding>& findings) {
  for (const CudaDeviceFacts& gpu : facts.gpus) {
    const bool is_supported = gpu.refusal.empty();
    findings.push_back(
        {is_supported ? FindingKind::ok : FindingKind::unused, "GPU", gpu_text(gpu), gpu.refusal});
  }
  if (!facts.gpus.empty()) return;
  const std::string why = facts.gpu_refusal.empty() ? "none found" : facts.gpu_refusal;
  findings.push_back({FindingKind::unused, "GPU",
                      facts.cuda_backend.empty() ? "not looked for" : why,
                      "nothing to do for runs on the CPU"});
}

/// GPUs and what they need: nothing of it is needed on the CPU.
void add_accelerators(const MachineFacts& facts, std::vector<Finding>& findings) {
  const auto add = [&](std::string part, bool is_there, std::string found, std::string remedy) {
    findings.push_back({is_there ? FindingKind::ok : FindingKind::unused, std::move(part),
                        is_there ? std::move(found) : std::string("not found"),
                        is_there ? "" : std::move(remedy)});
  };
  add("CUDA toolkit", !facts.cuda_toolkit.empty(), facts.cuda_toolkit,
      "only needed to build the CUDA backend");
  add("CUDA driver", facts.has_cuda_driver, "libcuda.so.1 loads", "comes with the GPU's driver");
  add("NCCL", facts.has_nccl, "libnccl.so.2 loads", "GPUs exchange shards by it");
  const bool has_backend = !facts.cuda_backend.empty();
  findings.push_back({has_backend ? FindingKind::ok : FindingKind::unused, "CUDA backend",
                      has_backend ? facts.cuda_backend : facts.cuda_backend_error,
                      has_backend ? ""
                                  : "built where nvcc and NCCL are (cmake -DCP_WITH_CUDA=ON says "
                                    "what is missing); opens where libnccl.so.2 is"});
  add_gpus(facts, findings);
  const bool is_aware = facts.is_mpi_cuda_aware.value_or(false);
  findings.push_back({is_aware ? FindingKind::ok : FindingKind::unused, "CUDA-aware MPI",
                      !facts.is_mpi_cuda_aware ? "ompi_info does not say"
                      : is_aware               ? "yes"
                                               : "no",
                      is_aware ? "" : "without it shards pass through host memory, or go by NCCL"});
}

/// What --device cuda and cpu-vs-cuda would do here.
Ability gpu_ability(const MachineFacts& facts, bool can_run_parity) {
  Ability ability{"parity on GPUs (--device cuda)", false, ""};
  if (facts.cuda_backend.empty()) {
    ability.why = "no CUDA backend";
  } else if (facts.gpus.empty()) {
    ability.why = facts.gpu_refusal.empty() ? "no GPU" : facts.gpu_refusal;
  } else if (!can_run_on_gpu(facts)) {
    ability.why = facts.gpus.front().refusal;
  } else if (!can_run_parity) {
    ability.why = "ranks are started by MPI: see what is missing";
  } else {
    ability.works = true;
    ability.why =
        fmt::format("{} GPU{}; NCCL up to as many ranks of a host, more through host memory",
                    facts.gpus.size(), facts.gpus.size() == 1 ? "" : "s");
  }
  return ability;
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
      {"plan of GPUs (--device cuda)", !facts.cuda_backend.empty(),
       facts.cuda_backend.empty() ? "no CUDA backend" : "needs no GPU"},
      gpu_ability(facts, diagnosis.can_run_parity),
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
