#include "src/comm/loopback_comm.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "src/base/digest.h"
#include "src/base/error.h"

namespace cpattn {

namespace {

constexpr int kNumTags = 8;  // every Tag is below

/// A report of another rank's failure: never the exception that run() rethrows if there is a cause.
class PeerFailed : public CommError {
 public:
  using CommError::CommError;
};

struct Message {
  std::vector<std::byte> bytes;
  Clock::time_point visible_at;
  std::atomic<bool> is_taken{false};
};

/// All messages of one (source, destination, tag), in the order they were posted.
struct Channel {
  std::mutex mutex;
  std::deque<std::shared_ptr<Message>> messages;
  std::int64_t num_posted = 0;
};

std::string text_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown exception";
  }
}

bool is_consequence(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const PeerFailed&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

class LoopbackHub {
 public:
  LoopbackHub(int size, const LoopbackOptions& options)
      : size_(size),
        options_(options),
        channels_(static_cast<std::size_t>(size) * size * kNumTags) {}

  int size() const { return size_; }
  const LoopbackOptions& options() const { return options_; }

  Channel& channel(int source, int destination, Tag tag) {
    return channels_[(static_cast<std::size_t>(source) * size_ + destination) * kNumTags +
                     static_cast<std::size_t>(tag)];
  }

  void begin() {
    has_failed_ = false;
    failure_text_.clear();
    failure_ = nullptr;
    for (Channel& channel : channels_) channel.messages.clear();
  }

  void fail(const std::string& text) {
    const std::lock_guard lock(mutex_);
    if (!has_failed_) failure_text_ = text;
    has_failed_ = true;
  }

  void record(int rank, const std::exception_ptr& exception) {
    fail(detail::concat("rank ", rank, " failed: ", text_of(exception)));
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr || (is_consequence(failure_) && !is_consequence(exception)))
      failure_ = exception;
  }

  void check_failure(int rank) {
    if (!has_failed_) return;
    const std::lock_guard lock(mutex_);
    throw PeerFailed(detail::concat("rank ", rank, ": ", failure_text_));
  }

  /// Once all ranks returned.
  void end() const {
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (!options_.must_receive_all) return;
    for (std::size_t i = 0; i < channels_.size(); ++i) {
      const std::size_t pair = i / kNumTags;
      invariant(channels_[i].messages.empty(), channels_[i].messages.size(), " messages of rank ",
                pair / size_, " to rank ", pair % size_, ", tag ", i % kNumTags,
                ", were never received");
    }
  }

 private:
  const int size_;
  const LoopbackOptions options_;
  std::vector<Channel> channels_;
  std::atomic<bool> has_failed_{false};
  std::mutex mutex_;  // guards the two below
  std::string failure_text_;
  std::exception_ptr failure_;
};

namespace {

class LoopbackComm final : public Communicator {
 public:
  LoopbackComm(LoopbackHub& hub, int rank) : hub_(hub), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return hub_.size(); }
  std::string_view transport() const override { return "loopback"; }

  Pending isend(std::span<const std::byte> bytes, int peer, Tag tag) override {
    check_peer(peer);
    hub_.check_failure(rank_);
    Channel& channel = hub_.channel(rank_, peer, tag);
    auto message = std::make_shared<Message>();
    message->bytes.assign(bytes.begin(), bytes.end());
    {
      const std::lock_guard lock(channel.mutex);
      message->visible_at = Clock::now() + delay(peer, tag, channel.num_posted++);
      channel.messages.push_back(message);
    }
    return add({.kind = Kind::send, .peer = peer, .tag = tag, .source = bytes, .message = message});
  }

  Pending irecv(std::span<std::byte> bytes, int peer, Tag tag) override {
    check_peer(peer);
    hub_.check_failure(rank_);
    const Pending pending = add({.kind = Kind::receive,
                                 .peer = peer,
                                 .tag = tag,
                                 .target = bytes,
                                 .channel = &hub_.channel(peer, rank_, tag)});
    receives_.push_back(pending.id);
    return pending;
  }

  bool test(Pending& pending) override {
    hub_.check_failure(rank_);
    progress_receives();
    invariant(pending.is_active() && pending.id < static_cast<std::int64_t>(operations_.size()) &&
                  operations_[pending.id].kind != Kind::none,
              "rank ", rank_, ": test() of a message that is not active");
    Operation& operation = operations_[pending.id];
    if (operation.kind == Kind::send ? !operation.message->is_taken : !operation.is_done)
      return false;

    const Operation finished = std::move(operation);
    operation = {};
    pending = {};
    if (!finished.error.empty()) throw CommError(finished.error);
    if (finished.kind == Kind::send && hub_.options().shuffle_seed != 0) check_untouched(finished);
    return true;
  }

  void abort(int exit_code, std::string_view reason) noexcept override {
    hub_.fail(detail::concat("rank ", rank_, " aborted with exit code ", exit_code, ": ", reason));
  }

 private:
  enum class Kind { none, send, receive };
  struct Operation {
    Kind kind = Kind::none;
    int peer = -1;
    Tag tag = Tag::test;
    std::span<const std::byte> source{};
    std::span<std::byte> target{};
    std::shared_ptr<Message> message{};
    Channel* channel = nullptr;
    bool is_done = false;
    std::string error{};
  };

  Clock::duration delay(int peer, Tag tag, std::int64_t message) const {
    if (hub_.options().shuffle_seed == 0) return {};
    Digest digest;
    for (const std::int64_t part :
         {static_cast<std::int64_t>(hub_.options().shuffle_seed), static_cast<std::int64_t>(rank_),
          static_cast<std::int64_t>(peer), static_cast<std::int64_t>(tag), message})
      digest.add(part);
    return std::chrono::microseconds((digest.value() >> 20) % 1000);
  }

  Pending add(Operation operation) {
    auto place = std::find_if(operations_.begin(), operations_.end(),
                              [](const Operation& entry) { return entry.kind == Kind::none; });
    if (place == operations_.end()) place = operations_.insert(place, Operation{});
    *place = std::move(operation);
    return {place - operations_.begin()};
  }

  /// Hands arrived messages to the posted receives. A receive may take from its channel only when
  /// no earlier one still waits on it.
  void progress_receives() {
    const Clock::time_point now = Clock::now();
    std::vector<const Channel*> blocked;
    for (const std::int64_t id : receives_) {
      Operation& receive = operations_[id];
      if (std::find(blocked.begin(), blocked.end(), receive.channel) != blocked.end()) continue;
      if (!take(receive, now)) blocked.push_back(receive.channel);
    }
    std::erase_if(receives_, [this](std::int64_t id) { return operations_[id].is_done; });
  }

  bool take(Operation& receive, Clock::time_point now) {
    std::shared_ptr<Message> message;
    {
      const std::lock_guard lock(receive.channel->mutex);
      auto& messages = receive.channel->messages;
      if (messages.empty() || messages.front()->visible_at > now) return false;
      message = messages.front();
      messages.pop_front();
    }
    if (message->bytes.size() != receive.target.size()) {
      receive.error =
          detail::concat("rank ", rank_, ": a message from rank ", receive.peer, ", tag ",
                         static_cast<int>(receive.tag), ", has ", message->bytes.size(), " bytes, ",
                         receive.target.size(), " expected");
    } else if (!message->bytes.empty()) {
      std::memcpy(receive.target.data(), message->bytes.data(), message->bytes.size());
    }
    message->is_taken = true;
    receive.is_done = true;
    return true;
  }

  void check_untouched(const Operation& send) const {
    const bool is_equal = std::equal(send.source.begin(), send.source.end(),
                                     send.message->bytes.begin(), send.message->bytes.end());
    invariant(is_equal, "rank ", rank_, ": bytes changed while they were being sent to rank ",
              send.peer);
  }

  LoopbackHub& hub_;
  const int rank_;
  std::vector<Operation> operations_;
  std::vector<std::int64_t> receives_;  // not done yet, in posting order
};

}  // namespace

LoopbackWorld::LoopbackWorld(int size, const LoopbackOptions& options) {
  require(size > 0, "a loopback world of ", size, " ranks: expected at least 1");
  hub_ = std::make_unique<LoopbackHub>(size, options);
}

LoopbackWorld::~LoopbackWorld() = default;

void LoopbackWorld::run(const std::function<void(Communicator&)>& body) {
  hub_->begin();
  {
    std::vector<std::jthread> threads;
    try {
      for (int rank = 0; rank < hub_->size(); ++rank) {
        threads.emplace_back([this, rank, &body] {
          LoopbackComm comm(*hub_, rank);
          try {
            body(comm);
          } catch (...) {
            hub_->record(rank, std::current_exception());
          }
        });
      }
    } catch (...) {  // no thread to be had: the ranks that did start must not wait for this one
      hub_->record(static_cast<int>(threads.size()), std::current_exception());
    }
  }
  hub_->end();
}

}  // namespace cpattn
