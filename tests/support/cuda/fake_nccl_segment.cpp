#include "tests/support/cuda/fake_nccl_segment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "src/base/error.h"
#include "tests/support/cuda/fake_signal.h"

namespace cpattn::fake_nccl {
namespace {

constexpr char kPrefix[] = "cpattn-fake-nccl-";

struct Mappings {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Mapping>> by_name;
};
Mappings& mappings() {
  static auto* const only = new Mappings;
  return *only;
}

/// Names carry the process that made them.
void remove_leftovers() {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    const int maker = std::atoi(name.c_str() + std::strlen(kPrefix));
    if (maker > 0 && kill(maker, 0) != 0 && errno == ESRCH) shm_unlink(("/" + name).c_str());
  }
}

}  // namespace

std::size_t Channel::write(const std::byte* from, std::size_t bytes_left) {
  const std::uint64_t written = num_written.load(std::memory_order_relaxed);
  const std::uint64_t read = num_read.load(std::memory_order_acquire);
  const std::size_t count = std::min<std::size_t>(bytes_left, kBytes - (written - read));
  const std::size_t at = written % kBytes, first = std::min(count, kBytes - at);
  std::memcpy(bytes + at, from, first);
  std::memcpy(bytes, from + first, count - first);
  num_written.store(written + count, std::memory_order_release);
  return count;
}

std::size_t Channel::read(std::byte* to, std::size_t bytes_left) {
  const std::uint64_t read = num_read.load(std::memory_order_relaxed);
  const std::uint64_t written = num_written.load(std::memory_order_acquire);
  const std::size_t count = std::min<std::size_t>(bytes_left, written - read);
  const std::size_t at = read % kBytes, first = std::min(count, kBytes - at);
  std::memcpy(to, bytes + at, first);
  std::memcpy(to + first, bytes, count - first);
  num_read.store(read + count, std::memory_order_release);
  return count;
}

void Segment::ring(int rank) {
  ranks[rank].bell.fetch_add(1, std::memory_order_relaxed);
  fake_cuda::wake_all_shared(ranks[rank].bell);
}

void Segment::ring_all() {
  for (int rank = 0; rank < num_ranks.load(std::memory_order_relaxed); ++rank) ring(rank);
}

std::shared_ptr<Mapping> Mapping::attach(const std::string& name) {
  const std::lock_guard lock(mappings().mutex);
  std::weak_ptr<Mapping>& known = mappings().by_name[name];
  std::shared_ptr<Mapping> mapping = known.lock();
  if (mapping == nullptr) {
    mapping = std::shared_ptr<Mapping>(new Mapping(name));
    known = mapping;
  }
  return mapping;
}

Mapping::Mapping(const std::string& name) : name_(name) {
  const int file = shm_open(("/" + name).c_str(), O_CREAT | O_RDWR, S_IRUSR | S_IWUSR);
  require<Unsupported>(file >= 0, "no shared memory: ", std::strerror(errno));
  const bool is_sized = ftruncate(file, sizeof(Segment)) == 0;
  void* memory = is_sized ? mmap(nullptr, sizeof(Segment), PROT_READ | PROT_WRITE,
                                 MAP_SHARED | MAP_NORESERVE, file, 0)
                          : MAP_FAILED;
  close(file);
  require<Unsupported>(memory != MAP_FAILED, "no shared memory: ", std::strerror(errno));
  segment_ = static_cast<Segment*>(memory);
}

Mapping::~Mapping() {
  drop_name();
  munmap(segment_, sizeof(Segment));
}

void Mapping::drop_name() {
  if (has_name_.exchange(false)) shm_unlink(("/" + name_).c_str());
}

std::string new_segment_name() {
  static std::atomic<unsigned> count{0};
  remove_leftovers();
  return detail::concat(kPrefix, getpid(), "-", count.fetch_add(1));
}

}  // namespace cpattn::fake_nccl
