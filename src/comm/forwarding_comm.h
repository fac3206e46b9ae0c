// A Communicator that passes everything on to another: override one thing of it.
#pragma once

#include <span>
#include <string_view>

#include "src/comm/communicator.h"

namespace cpattn {

class ForwardingComm : public Communicator {
 public:
  explicit ForwardingComm(Communicator& inner) : inner_(inner) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::string_view transport() const override { return inner_.transport(); }
  std::size_t max_message_bytes() const override { return inner_.max_message_bytes(); }
  bool takes_device_memory() const override { return inner_.takes_device_memory(); }
  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    return inner_.isend(bytes, peer, tag);
  }
  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    return inner_.irecv(bytes, peer, tag);
  }
  bool test(Pending& pending) override { return inner_.test(pending); }
  void abort(int exit_code, std::string_view reason) noexcept override {
    inner_.abort(exit_code, reason);
  }

 private:
  Communicator& inner_;
};

}  // namespace cpattn
