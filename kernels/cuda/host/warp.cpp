#include "kernels/cuda/host/warp.h"

#include <bit>

#include "kernels/cuda/host/block.h"
#include "kernels/cuda/host/sanitizers.h"

namespace cpattn::cuda_host {
namespace {

/// The meeting for this mask, or a free one.
Meeting& meeting_for(Warp& warp, unsigned mask, const char* name) {
  Meeting* free = nullptr;
  for (Meeting& it : warp.meetings) {
    if (it.arrived != 0 && it.mask == mask) return it;
    if (it.arrived == 0 && free == nullptr) free = &it;
  }
  if (free == nullptr) {
    fail(name, ": lanes of this warp wait with ", Warp::kMeetings, " other masks");
  }
  return *free;
}

[[noreturn]] void fail_exited(const WarpOperation& operation, unsigned exited) {
  fail(operation.name, ": lane ", std::countr_zero(exited),
       " does not exist or has exited, and this instruction needs all of its lanes");
}

/// Does the work if everybody is here: makes all but `last` ready.
bool try_to_finish(Block& block, unsigned warp_number, Meeting& meeting, unsigned last) {
  const Warp& warp = block.warp(warp_number);
  if (((meeting.arrived | warp.exited) & meeting.mask) != meeting.mask) return false;
  const unsigned present = meeting.arrived;
  meeting.operation->perform({present, meeting.operand});
  meeting.arrived = 0;
  ++block.counters().warp_operations;
  for (unsigned lanes = present & ~last; lanes != 0; lanes &= lanes - 1) {
    const unsigned lane = static_cast<unsigned>(std::countr_zero(lanes));
    block.make_ready(block.thread(warp_number * kWarpLanes + lane));
  }
  return true;
}

struct ShuffleOperand {
  ShuffleKind kind;
  int argument;
  int width;
  const void* in;
  void* out;
  std::size_t bytes;
};

unsigned shuffle_source(const ShuffleOperand& operand, int lane) {
  const int first = lane & ~(operand.width - 1);
  const int last = first + operand.width - 1;
  int source = lane;
  switch (operand.kind) {
    case ShuffleKind::index:
      source = first + (operand.argument & (operand.width - 1));
      break;
    case ShuffleKind::up:
      source = lane - operand.argument < first ? lane : lane - operand.argument;
      break;
    case ShuffleKind::down:
      source = lane + operand.argument > last ? lane : lane + operand.argument;
      break;
    case ShuffleKind::butterfly:
      // Earlier segments may be read, later ones not.
      source = (lane ^ operand.argument) > last ? lane : lane ^ operand.argument;
      break;
  }
  return static_cast<unsigned>(source);
}

void perform_shuffle(const Lanes& lanes) {
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if ((lanes.mask >> lane & 1u) == 0) continue;
    const auto& to = lanes.of<ShuffleOperand>(lane);
    const unsigned source = shuffle_source(to, static_cast<int>(lane));
    if (source >= kWarpLanes || (lanes.mask >> source & 1u) == 0) {
      fail("shuffle: lane ", lane, " reads lane ", source, ", which does not take part");
    }
    // Expanded in line: a call of memcpy would be looked at by the sanitizers.
    const void* from = lanes.of<ShuffleOperand>(source).in;
    if (to.bytes == 4) {
      __builtin_memcpy(to.out, from, 4);
    } else {
      __builtin_memcpy(to.out, from, 8);
    }
  }
}

struct BallotOperand {
  bool predicate;
  unsigned result;
};

void perform_ballot(const Lanes& lanes) {
  unsigned result = 0;
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if ((lanes.mask >> lane & 1u) == 0) continue;
    if (lanes.of<BallotOperand>(lane).predicate) result |= 1u << lane;
  }
  for (unsigned lane = 0; lane < kWarpLanes; ++lane) {
    if ((lanes.mask >> lane & 1u) != 0) lanes.of<BallotOperand>(lane).result = result;
  }
}

void perform_nothing(const Lanes&) {}

constexpr WarpOperation kShuffles[] = {
    {"__shfl_sync", perform_shuffle, false},
    {"__shfl_up_sync", perform_shuffle, false},
    {"__shfl_down_sync", perform_shuffle, false},
    {"__shfl_xor_sync", perform_shuffle, false},
};
constexpr WarpOperation kBallot{"__ballot_sync", perform_ballot, false};
constexpr WarpOperation kSyncWarp{"__syncwarp", perform_nothing, false};

}  // namespace

void meet_warp(const WarpOperation& operation, unsigned mask, void* operand) {
  Block& block = *current_thread->block;
  const unsigned lane = current_thread->lane, warp_number = current_thread->warp;
  Warp& warp = block.warp(warp_number);
  const unsigned me = 1u << lane;
  if ((mask & me) == 0) {
    fail(operation.name, ": lane ", lane, " is not in the mask 0x", std::hex, mask, " it gives");
  }
  if (operation.needs_all_lanes && (warp.exited & mask) != 0) {
    fail_exited(operation, warp.exited & mask);
  }
  Meeting& meeting = meeting_for(warp, mask, operation.name);
  if (meeting.arrived != 0 && meeting.operation != &operation) {
    fail("divergent warp: lane ", lane, " is at ", operation.name, " while lane ",
         std::countr_zero(meeting.arrived), " waits at ", meeting.operation->name);
  }
  meeting.operation = &operation;
  meeting.mask = mask;
  meeting.operand[lane] = operand;
  meeting.arrived |= me;
  if (!try_to_finish(block, warp_number, meeting, me)) block.wait(operation.name, mask);
}

void meet_warpgroup(const WarpgroupOperation& operation, void* operand) {
  Block& block = *current_thread->block;
  const unsigned number = current_thread->number;
  const unsigned first = number / kWarpgroupThreads * kWarpgroupThreads;
  if (first + kWarpgroupThreads > block.num_threads()) {
    fail(operation.name, ": the block's ", block.num_threads(),
         " threads end within this thread's warpgroup");
  }
  Warpgroup& group = block.warpgroup(number / kWarpgroupThreads);
  if (group.arrived > 0 && group.operation != &operation) {
    fail("divergent warpgroup: thread ", number, " is at ", operation.name,
         " while others wait at ", group.operation->name);
  }
  group.operation = &operation;
  group.operand[number - first] = operand;
  if (++group.arrived < kWarpgroupThreads) {
    block.wait(operation.name, number / kWarpgroupThreads);
    return;
  }
  operation.perform(group.operand);
  group.arrived = 0;
  for (unsigned i = first; i < first + kWarpgroupThreads; ++i) {
    if (i != number) block.make_ready(block.thread(i));
  }
}

void sync_warp(unsigned mask) {
  Warp& warp = current_thread->block->warp(current_thread->warp);
  char* tag = &warp.tag;
  race_release(tag);
  meet_warp(kSyncWarp, mask, nullptr);
  race_acquire(tag);
}

void shuffle(ShuffleKind kind, unsigned mask, int argument, int width, const void* in, void* out,
             std::size_t bytes) {
  if (width <= 0 || width > static_cast<int>(kWarpLanes) || (width & (width - 1)) != 0) {
    fail("shuffle: a width of ", width, "; expected a power of two up to 32");
  }
  ShuffleOperand operand{kind, argument, width, in, out, bytes};
  meet_warp(kShuffles[static_cast<int>(kind)], mask, &operand);
}

unsigned ballot(unsigned mask, bool predicate) {
  BallotOperand operand{predicate, 0};
  meet_warp(kBallot, mask, &operand);
  return operand.result;
}

void lane_exits(Block& block, const DeviceThread& thread) {
  Warp& warp = block.warp(thread.warp);
  const unsigned me = 1u << thread.lane;
  warp.exited |= me;
  for (Meeting& meeting : warp.meetings) {
    if (meeting.arrived == 0 || (meeting.mask & me) == 0) continue;
    if (meeting.operation->needs_all_lanes) fail_exited(*meeting.operation, me);
    try_to_finish(block, thread.warp, meeting, 0);
  }
}

}  // namespace cpattn::cuda_host
