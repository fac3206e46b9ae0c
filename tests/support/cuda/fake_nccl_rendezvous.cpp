// How the ranks of a communicator find one another, at its beginning and when it is split.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tests/support/cuda/fake_nccl_comm.h"

namespace cpattn::fake_nccl {
namespace {

/// Sleeps until the condition holds for all ranks; false: aborted meanwhile.
template <class Condition>
bool wait_for_all(Communicator& communicator, const std::atomic<bool>& is_aborted,
                  Condition condition) {
  for (;;) {
    const std::uint32_t seen = communicator.slot().bell.load(std::memory_order_relaxed);
    bool holds = true;
    for (int rank = 0; rank < communicator.num_ranks; ++rank) {
      holds = condition(communicator.segment().ranks[rank]) && holds;
    }
    if (holds) return true;
    if (is_aborted.load(std::memory_order_relaxed) ||
        communicator.is_aborted.load(std::memory_order_relaxed)) {
      return false;
    }
    wait_for_bell(communicator, seen);
  }
}

ncclResult_t check_devices(Communicator& communicator) {
  if (fabric().allows_duplicate_devices) return ncclSuccess;
  Segment& segment = communicator.segment();
  for (int rank = 0; rank < communicator.num_ranks; ++rank) {
    for (int other = 0; other < rank; ++other) {
      const int device = segment.ranks[rank].device.load(std::memory_order_relaxed);
      if (device != segment.ranks[other].device.load(std::memory_order_relaxed)) continue;
      return refuse(ncclInvalidUsage, "Duplicate GPU detected : rank ", other, " and rank ", rank,
                    " both on CUDA device ", device);
    }
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t attach(Communicator& communicator) {
  try {
    communicator.mapping = Mapping::attach(communicator.name);
  } catch (const Error& problem) {
    return refuse(ncclSystemError, problem.what());
  }
  Segment& segment = communicator.segment();
  int num_ranks = 0;
  if (!segment.num_ranks.compare_exchange_strong(num_ranks, communicator.num_ranks) &&
      num_ranks != communicator.num_ranks) {
    return refuse(ncclInvalidArgument, "rank ", communicator.rank, " of ", communicator.num_ranks,
                  ": others say there are ", num_ranks);
  }
  RankSlot& slot = communicator.slot();
  slot.device.store(communicator.device, std::memory_order_relaxed);
  slot.process.store(getpid(), std::memory_order_relaxed);
  Presence absent = Presence::absent;
  if (!slot.presence.compare_exchange_strong(absent, Presence::attached)) {
    return refuse(ncclInvalidUsage, "rank ", communicator.rank, " has attached already");
  }
  segment.ring_all();
  const bool is_complete =
      wait_for_all(communicator, communicator.is_aborted, [](const RankSlot& other) {
        return other.presence.load(std::memory_order_acquire) != Presence::absent;
      });
  communicator.mapping->drop_name();
  if (!is_complete) return refuse(ncclInternalError, "aborted before all ranks had come");
  return check_devices(communicator);
}

ncclResult_t split(Communicator& parent, int color, int key, Communicator* child) {
  const std::uint32_t round = ++parent.num_splits;
  const auto post_of = [round](RankSlot& slot) -> SplitPost& { return slot.posts[round % 2]; };
  SplitPost& mine = post_of(parent.slot());
  mine.color.store(color, std::memory_order_relaxed);
  mine.key.store(key, std::memory_order_relaxed);
  mine.round.store(round, std::memory_order_release);
  parent.segment().ring_all();
  const std::atomic<bool>& is_aborted = child != nullptr ? child->is_aborted : parent.is_aborted;
  const bool is_complete = wait_for_all(parent, is_aborted, [&](RankSlot& slot) {
    return post_of(slot).round.load(std::memory_order_acquire) >= round;
  });
  if (!is_complete) return refuse(ncclInternalError, "aborted before all ranks had come");
  if (child == nullptr) return ncclSuccess;
  std::vector<std::pair<int, int>> group;  // by key, then by rank of the parent
  for (int rank = 0; rank < parent.num_ranks; ++rank) {
    const SplitPost& post = post_of(parent.segment().ranks[rank]);
    if (post.color.load(std::memory_order_relaxed) != color) continue;
    group.emplace_back(post.key.load(std::memory_order_relaxed), rank);
  }
  std::sort(group.begin(), group.end());
  const auto place = std::find(group.begin(), group.end(), std::pair(key, parent.rank));
  child->rank = static_cast<int>(place - group.begin());
  child->num_ranks = static_cast<int>(group.size());
  child->name = detail::concat(parent.name, ".", round, ".", color);
  return attach(*child);
}

}  // namespace cpattn::fake_nccl
