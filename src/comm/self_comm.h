// A group of one: the rank that talks to nobody but itself, with no thread or library behind it.
//
// Messages are copied when they are posted and delivered first in, first out per tag, so that code
// written for any number of ranks runs unchanged with one.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/comm/communicator.h"

namespace cpattn {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string_view transport() const override { return "self"; }
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override;
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override;
  bool test(Pending& pending) override;
  /// There is nobody to end: the exception that leads here says it all.
  void abort(int, std::string_view) noexcept override {}

 private:
  struct Message {
    std::span<std::byte> target;  // of a receive
    bool is_done = false;
    std::string error;  // thrown by its own test()
  };
  struct Channel {
    std::deque<std::vector<std::byte>> sent;  // not received yet
    std::deque<std::int64_t> waiting;         // receives, in posting order
  };

  static void deliver(const std::vector<std::byte>& bytes, Message& receive);

  std::int64_t next_id_ = 0;
  std::map<Tag, Channel> channels_;
  std::map<std::int64_t, Message> active_;
};

}  // namespace cpattn
