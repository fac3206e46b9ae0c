#include "src/comm/self_comm.h"

#include <algorithm>

#include "src/base/error.h"

namespace cpattn {

void SelfCommunicator::deliver(const std::vector<std::byte>& bytes, Message& receive) {
  receive.is_done = true;
  if (bytes.size() == receive.target.size()) {
    std::copy(bytes.begin(), bytes.end(), receive.target.begin());
  } else {
    receive.error = detail::concat("rank 0: a message from rank 0 has ", bytes.size(), " bytes, ",
                                   receive.target.size(), " expected");
  }
}

Pending SelfCommunicator::isend(std::span<const std::byte> bytes, int peer, Tag tag) {
  check_peer(peer);
  Channel& channel = channels_[tag];
  channel.sent.emplace_back(bytes.begin(), bytes.end());
  if (!channel.waiting.empty()) {
    deliver(channel.sent.front(), active_[channel.waiting.front()]);
    channel.waiting.pop_front();
    channel.sent.pop_front();
  }
  active_[next_id_].is_done = true;
  return {next_id_++};
}

Pending SelfCommunicator::irecv(std::span<std::byte> bytes, int peer, Tag tag) {
  check_peer(peer);
  Channel& channel = channels_[tag];
  active_[next_id_].target = bytes;
  if (channel.sent.empty()) {
    channel.waiting.push_back(next_id_);
  } else {
    deliver(channel.sent.front(), active_[next_id_]);
    channel.sent.pop_front();
  }
  return {next_id_++};
}

bool SelfCommunicator::test(Pending& pending) {
  const auto found = active_.find(pending.id);
  invariant(found != active_.end(), "rank 0: test() of a message that is not active");
  if (!found->second.is_done) return false;
  const std::string error = found->second.error;
  active_.erase(found);
  pending = {};
  require<CommError>(error.empty(), error);
  return true;
}

}  // namespace cpattn
