#include "kernels/cuda/host/async_copies.h"

#include "kernels/cuda/host/block.h"

namespace cpattn::cuda_host {
namespace {

DeviceThread& self() { return current_thread->block->self(); }

}  // namespace

bool start_copy(Bytes16* to, const Bytes16* from) {
  DeviceThread& me = self();
  me.copies.push_back({to, from, me.copy_group});
  return me.block->options().landing == Landing::early;
}

void commit_copies() { ++self().copy_group; }

const AsyncCopy* next_copy(unsigned num_newest) {
  DeviceThread& me = self();
  while (me.first_copy < me.copies.size() &&
         me.copies[me.first_copy].group + num_newest < me.copy_group) {
    const AsyncCopy& copy = me.copies[me.first_copy++];
    if (me.block->options().landing == Landing::late) return &copy;
  }
  if (me.first_copy == me.copies.size()) {
    me.copies.clear();
    me.first_copy = 0;
  }
  return nullptr;
}

void check_copies_done(const DeviceThread& thread) {
  const std::size_t left = thread.copies.size() - thread.first_copy;
  if (left > 0) fail("the thread exits with ", left, " copies (cp.async) it never waited for");
}

}  // namespace cpattn::cuda_host
