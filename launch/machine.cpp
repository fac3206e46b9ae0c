#include "launch/machine.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <sstream>

#include "kernels/kernel_table.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

/// Lines a shell command prints; none when it fails or is late. A broken driver can hang its tools.
std::vector<std::string> lines_of(const std::string& command) {
  struct Close {
    void operator()(std::FILE* pipe) const { ::pclose(pipe); }
  };
  const std::string guarded = "timeout 10 " + command + " 2>/dev/null";
  const std::unique_ptr<std::FILE, Close> pipe(::popen(guarded.c_str(), "r"));
  std::string text;
  std::array<char, 4096> part{};
  while (pipe) {
    const std::size_t count = std::fread(part.data(), 1, part.size(), pipe.get());
    if (count == 0) break;
    text.append(part.data(), count);
  }
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string first_line_of(const std::string& command) {
  const auto lines = lines_of(command);
  return lines.empty() ? "" : lines.front();
}

bool can_load(const char* library) {
  void* const handle = ::dlopen(library, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) return false;
  ::dlclose(handle);
  return true;
}

int count_usable_cores() {
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    cpu_set_t* const set = CPU_ALLOC(capacity);
    const std::size_t size = CPU_ALLOC_SIZE(capacity);
    const int status = ::sched_getaffinity(0, size, set);
    const int count = status == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (status == 0) return count;
  }
  return 0;
}

/// "max 100000" or "200000 100000" of cgroup v2; v1 keeps two files.
double core_quota() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  double quota = 0.0;
  double period = 0.0;
  if (v2 >> quota >> period) return period > 0.0 ? quota / period : 0.0;
  std::ifstream v1_quota("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream v1_period("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (v1_quota >> quota && v1_period >> period && quota > 0.0 && period > 0.0) {
    return quota / period;
  }
  return 0.0;
}

std::uint64_t memory_limit(std::uint64_t memory_total) {
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    std::uint64_t bytes = 0;
    if (file >> bytes) return bytes < memory_total ? bytes : 0;  // v1 writes a huge number
  }
  return 0;
}

std::uint64_t meminfo(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::uint64_t kilobytes = 0;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    if (words >> name >> kilobytes && name == key + ":") return kilobytes * 1024;
  }
  return 0;
}

std::uint64_t shared_memory_free() {
  struct statvfs status {};
  if (::statvfs("/dev/shm", &status) != 0) return 0;
  return std::uint64_t{status.f_bavail} * status.f_frsize;
}

/// Whether a process may read the memory of one that is not its child, as ranks of one host do
/// (Open MPI's "single copy"): a child tries it on us.
std::string single_copy_error() {
  int secret = 42;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    int copy = 0;
    const iovec here{&copy, sizeof(copy)};
    const iovec there{&secret, sizeof(secret)};
    const ssize_t count = ::process_vm_readv(parent, &here, 1, &there, 1, 0);
    ::_exit(count == sizeof(copy) && copy == secret ? 0 : (errno & 0x7f) | 0x80);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) {
    return "could not be tried";
  }
  return WEXITSTATUS(status) == 0 ? "" : std::strerror(WEXITSTATUS(status) & 0x7f);
}

std::string cuda_toolkit() {
  for (const char* command : {"nvcc --version", "/usr/local/cuda/bin/nvcc --version"}) {
    for (const std::string& line : lines_of(command)) {
      if (line.find("release") != std::string::npos) return line;
    }
  }
  return "";
}

}  // namespace

std::optional<bool> mpi_cuda_awareness() {
  constexpr std::string_view key = "mpi_built_with_cuda_support:value:";
  for (const std::string& line : lines_of("ompi_info --parsable --all")) {
    const std::size_t place = line.find(key);
    if (place != std::string::npos) return line.substr(place + key.size()) == "true";
  }
  return std::nullopt;
}

MachineFacts examine_machine() {
  MachineFacts facts;
  facts.is_built_with_mpi = CP_BUILT_WITH_MPI;
  facts.is_built_with_openmp = CP_BUILT_WITH_OPENMP;
  for (const KernelTable* table : available_kernels()) facts.kernels.emplace_back(table->name);

  facts.mpirun_version = first_line_of("mpirun --version");
  facts.usable_cores = count_usable_cores();
  facts.online_cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.core_quota = core_quota();
  facts.is_root = ::geteuid() == 0;
  facts.single_copy_error = single_copy_error();

  facts.memory_total = meminfo("MemTotal");
  facts.memory_available = meminfo("MemAvailable");
  facts.memory_limit = memory_limit(facts.memory_total);
  facts.shared_memory_free = shared_memory_free();

  facts.cuda_toolkit = cuda_toolkit();
  facts.has_cuda_driver = can_load("libcuda.so.1");
  facts.has_nccl = can_load("libnccl.so.2");
  facts.is_mpi_cuda_aware = mpi_cuda_awareness();
  examine_gpus("", facts);
  return facts;
}

void examine_gpus(const std::string& path, MachineFacts& facts) {
  try {
    const std::shared_ptr<CudaBackend> backend = CudaBackend::open(path);
    facts.cuda_backend = backend->description();
    facts.gpu_refusal = backend->refusal();
    if (facts.gpu_refusal.empty()) facts.gpus = backend->devices();
  } catch (const Error& error) {
    facts.cuda_backend_error = error.what();
  }
}

}  // namespace cpattn
