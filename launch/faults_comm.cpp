#include "launch/faults_comm.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <map>
#include <thread>

#include "src/base/dtype.h"
#include "src/comm/forwarding_comm.h"

namespace cpattn {
namespace {

class LeavingCommunicator final : public ForwardingComm {
 public:
  LeavingCommunicator(Communicator& comm, bool ends) : ForwardingComm(comm), ends_(ends) {}

  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    leave_at(tag);
    return ForwardingComm::isend(bytes, peer, tag);
  }
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    leave_at(tag);
    return ForwardingComm::irecv(bytes, peer, tag);
  }

 private:
  void leave_at(Tag tag) const {
    if (tag != Tag::ring_header && tag != Tag::ring_payload) return;
    if (ends_) ::_exit(0);
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }

  bool ends_;
};

class RoundingCommunicator final : public ForwardingComm {
 public:
  RoundingCommunicator(Communicator& comm, std::int64_t& sites)
      : ForwardingComm(comm), sites_(sites) {}

  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    const Pending pending = ForwardingComm::irecv(bytes, peer, tag);
    if (tag == Tag::direct_payload && peer != rank()) awaited_[pending.id] = bytes;
    return pending;
  }
  bool test(Pending& pending) override {
    const auto awaited = awaited_.find(pending.id);
    if (!ForwardingComm::test(pending)) return false;
    if (awaited != awaited_.end()) {
      round(awaited->second);
      awaited_.erase(awaited);
    }
    return true;
  }

 private:
  void round(std::span<std::byte> bytes) {
    for (std::size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
      float value = 0.0f;
      std::memcpy(&value, &bytes[at], sizeof(value));
      value = to_float(to_bf16(value));
      std::memcpy(&bytes[at], &value, sizeof(value));
      ++sites_;
    }
  }

  std::int64_t& sites_;
  std::map<std::int64_t, std::span<std::byte>> awaited_;
};

}  // namespace

std::unique_ptr<Communicator> make_leaving(Communicator& comm, bool ends) {
  return std::make_unique<LeavingCommunicator>(comm, ends);
}

std::unique_ptr<Communicator> make_rounding(Communicator& comm, std::int64_t& sites) {
  return std::make_unique<RoundingCommunicator>(comm, sites);
}

}  // namespace cpattn
