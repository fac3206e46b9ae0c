// The memory that the ranks of one communicator share, whether they are threads or processes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tests/support/cuda/fake_nccl.h"

namespace cpattn::fake_nccl {

/// What one rank has to say in one round of splitting.
struct SplitPost {
  std::atomic<std::uint32_t> round{0};
  std::atomic<int> color{0};
  std::atomic<int> key{0};
};

enum class Presence : std::uint32_t { absent, attached, left, aborted };

struct RankSlot {
  std::atomic<Presence> presence{Presence::absent};
  std::atomic<std::uint32_t> bell{0};  ///< rung when there may be something to do for this rank
  std::atomic<int> device{0};
  std::atomic<int> process{0};
  SplitPost posts[2];  ///< by parity of the round: nobody is two rounds ahead of another
};

/// Bytes on their way from one rank to another.
struct Channel {
  static constexpr std::size_t kBytes = 64 * 1024;
  alignas(64) std::atomic<std::uint64_t> num_written{0};
  alignas(64) std::atomic<std::uint64_t> num_read{0};
  alignas(64) std::byte bytes[kBytes];

  /// As much as fits, or as there is; the number of bytes moved.
  std::size_t write(const std::byte* from, std::size_t bytes_left);
  std::size_t read(std::byte* to, std::size_t bytes_left);
};

/// All zeros is its initial state: so a fresh segment needs nobody to prepare it.
struct Segment {
  std::atomic<int> num_ranks{0};
  RankSlot ranks[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];  ///< [from][to]

  void ring(int rank);
  void ring_all();
};

/// A segment in this process: one for all its ranks, since the sanitizers go by address.
class Mapping {
 public:
  /// Made by who comes first.
  static std::shared_ptr<Mapping> attach(const std::string& name);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  Segment& segment() { return *segment_; }
  /// Everybody has attached (or nobody will): the name goes, the memory stays until all let go.
  void drop_name();

 private:
  explicit Mapping(const std::string& name);

  const std::string name_;
  Segment* segment_ = nullptr;
  std::atomic<bool> has_name_{true};
};

/// Names that no other communicator has; also removes what processes that died before everybody
/// had attached left behind.
std::string new_segment_name();

}  // namespace cpattn::fake_nccl
