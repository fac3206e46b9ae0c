#include "src/comm/ring_exchange.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "src/base/digest.h"
#include "src/base/error.h"

namespace cpattn {

namespace {

constexpr std::uint64_t kMagic = 0x31676e6972706363ull;  // "ccpring1" in memory order

struct HopHeader {
  std::uint64_t magic = kMagic;
  std::uint64_t hop = 0;               ///< counted over all steps and resets
  std::uint64_t owner = 0;             ///< whose span the payload is
  std::uint64_t bytes = 0;             ///< of the payload
  std::uint64_t payload_checksum = 0;  ///< 0 when payloads are not verified
  std::uint64_t header_checksum = 0;   ///< of the fields above

  std::uint64_t expected_checksum() const {
    Digest digest;
    for (const std::uint64_t field : {magic, hop, owner, bytes, payload_checksum})
      digest.add(static_cast<std::int64_t>(field));
    return digest.value();
  }
};

/// A change of any single word changes the result: every step is a bijection of the state for a
/// given word, and of the word for a given state.
std::uint64_t checksum_of(std::span<const std::byte> bytes) {
  constexpr std::uint64_t kOddMultiplier = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio
  std::uint64_t state = bytes.size();
  const auto mix = [&state](std::uint64_t word) {
    state = (state ^ word) * kOddMultiplier;
    state ^= state >> 32;
  };
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word;
    std::memcpy(&word, bytes.data() + at, 8);
    mix(word);
  }
  if (at < bytes.size()) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, bytes.size() - at);
    mix(word);
  }
  return state;
}

int modulo(int value, int size) { return ((value % size) + size) % size; }

}  // namespace

struct RingExchange::Hop {
  bool is_active = false;  ///< between post() and the end of wait()
  bool is_posted = false;  ///< messages given to the transport (later than post() with a delay)
  bool is_header_in = false;
  Clock::time_point post_at{};
  Pending header_in, payload_in, header_out, payload_out;
  HopHeader arrived;

  bool is_receive_done() const { return is_header_in && !payload_in.is_active(); }
  bool is_send_done() const { return !header_out.is_active() && !payload_out.is_active(); }
  bool is_done() const { return is_posted && is_receive_done() && is_send_done(); }
  bool is_in_flight() const {
    return header_in.is_active() || payload_in.is_active() || !is_send_done();
  }
};

RingExchange::RingExchange(Communicator& comm, std::vector<std::size_t> span_bytes,
                           const RingOptions& options)
    : comm_(comm),
      span_bytes_(std::move(span_bytes)),
      options_(options),
      headers_(2 * sizeof(HopHeader)),
      hop_(std::make_unique<Hop>()) {
  require(span_bytes_.size() == static_cast<std::size_t>(comm.size()), "rank ", comm.rank(),
          ": ring exchange: ", span_bytes_.size(), " span sizes for ", comm.size(), " ranks");
  require(options.direction == 1 || options.direction == -1, "rank ", comm.rank(),
          ": ring exchange: direction ", options.direction, ", expected 1 or -1");
  const std::size_t slot_bytes = *std::max_element(span_bytes_.begin(), span_bytes_.end());
  slots_[0] = Buffer(slot_bytes);
  if (comm.size() > 1) slots_[1] = Buffer(slot_bytes);
}

RingExchange::~RingExchange() {
  if (!hop_->is_in_flight()) return;
  // A failure left messages posted: the transport may still read or write these bytes.
  comm_.keep_until_end(std::move(slots_[0]));
  comm_.keep_until_end(std::move(slots_[1]));
  comm_.keep_until_end(std::move(headers_));
}

std::size_t RingExchange::workspace_bytes(std::span<const std::size_t> span_bytes) {
  if (span_bytes.empty()) return 0;
  const std::size_t largest = *std::max_element(span_bytes.begin(), span_bytes.end());
  return span_bytes.size() == 1 ? largest : 2 * largest;
}

void RingExchange::reset() {
  if (failure_) std::rethrow_exception(failure_);
  invariant(!hop_->is_active, place(), "reset() while a hop is in flight");
  step_ = 0;
}

std::span<std::byte> RingExchange::own() {
  invariant(step_ == 0 && !hop_->is_active, place(), "own() is writable at step 0 before post()");
  return slots_[current_slot_].bytes().first(span_bytes_[comm_.rank()]);
}

int RingExchange::step() const { return step_; }

int RingExchange::owner_at(int step) const {
  return modulo(comm_.rank() - step * options_.direction, comm_.size());
}

int RingExchange::current_owner() const { return owner_at(step_); }

std::span<const std::byte> RingExchange::current() const {
  return slots_[current_slot_].bytes().first(span_bytes_[current_owner()]);
}

const RingStats& RingExchange::stats() const { return stats_; }

std::string RingExchange::place() const {
  return detail::concat("rank ", comm_.rank(), ": step ", step_, ": ");
}

void RingExchange::post() {
  if (failure_) std::rethrow_exception(failure_);
  if (step_ == last_step()) return;
  invariant(!hop_->is_active, place(), "post() twice without wait()");

  *hop_ = {};
  hop_->is_active = true;
  if (options_.verify_checksum && step_ == 0) current_checksum_ = checksum_of(current());
  if (options_.delay_seed != 0) {
    constexpr std::uint64_t kMaxDelayUs = 2000;
    Digest digest;
    digest.add(static_cast<std::int64_t>(options_.delay_seed));
    digest.add(static_cast<std::int64_t>(comm_.rank()));
    digest.add(static_cast<std::int64_t>(step_));
    hop_->post_at =
        Clock::now() + std::chrono::microseconds((digest.value() >> 20) % (kMaxDelayUs + 1));
    return;
  }
  post_messages();
}

void RingExchange::post_messages() {
  const int next = modulo(comm_.rank() + options_.direction, comm_.size());
  const int previous = modulo(comm_.rank() - options_.direction, comm_.size());
  const auto header_out = headers_.bytes().first(sizeof(HopHeader));
  const auto header_in = headers_.bytes().last(sizeof(HopHeader));
  const auto payload_in = slots_[1 - current_slot_].bytes().first(span_bytes_[owner_at(step_ + 1)]);

  HopHeader header{.hop = static_cast<std::uint64_t>(stats_.hops),
                   .owner = static_cast<std::uint64_t>(current_owner()),
                   .bytes = current().size(),
                   .payload_checksum = options_.verify_checksum ? current_checksum_ : 0};
  header.header_checksum = header.expected_checksum();
  std::memcpy(header_out.data(), &header, sizeof header);

  hop_->is_posted = true;
  hop_->header_in = comm_.irecv(header_in, previous, Tag::ring_header);
  hop_->payload_in = comm_.irecv(payload_in, previous, Tag::ring_payload);
  hop_->header_out = comm_.isend(header_out, next, Tag::ring_header);
  hop_->payload_out = comm_.isend(current(), next, Tag::ring_payload);
  stats_.messages_posted += 4;
  stats_.bytes_sent += current().size();
}

void RingExchange::progress() {
  if (!hop_->is_posted) {
    if (Clock::now() < hop_->post_at) return;
    post_messages();
  }
  // The payload is looked at only after its header, so that a wrong length is reported by what the
  // peer says it sent, not by what the transport makes of it.
  if (hop_->header_in.is_active() && comm_.test(hop_->header_in)) verify_header();
  if (hop_->is_header_in && hop_->payload_in.is_active() && comm_.test(hop_->payload_in))
    verify_payload();
  if (hop_->header_out.is_active()) comm_.test(hop_->header_out);
  if (hop_->payload_out.is_active()) comm_.test(hop_->payload_out);
}

void RingExchange::verify_header() {
  HopHeader& header = hop_->arrived;
  std::memcpy(&header, headers_.bytes().last(sizeof(HopHeader)).data(), sizeof header);
  const int previous = modulo(comm_.rank() - options_.direction, comm_.size());
  const auto owner = static_cast<std::uint64_t>(owner_at(step_ + 1));
  const std::size_t bytes = span_bytes_[owner];
  const auto hop = static_cast<std::uint64_t>(stats_.hops);

  require<CommError>(header.magic == kMagic && header.header_checksum == header.expected_checksum(),
                     place(), "the header from rank ", previous, " is corrupted");
  require<CommError>(header.hop == hop, place(), "rank ", previous, " sent hop ", header.hop,
                     ", expected hop ", hop);
  require<CommError>(header.owner == owner, place(), "rank ", previous, " sent the span of rank ",
                     header.owner, ", expected that of rank ", owner);
  require<CommError>(header.bytes == bytes, place(), "rank ", previous, " sent ", header.bytes,
                     " bytes, expected ", bytes);
  hop_->is_header_in = true;
}

void RingExchange::verify_payload() const {
  if (!options_.verify_checksum) return;
  const int owner = owner_at(step_ + 1);
  const auto payload = slots_[1 - current_slot_].bytes().first(span_bytes_[owner]);
  const std::uint64_t checksum = checksum_of(payload);
  require<CommError>(checksum == hop_->arrived.payload_checksum, place(), "the payload from rank ",
                     modulo(comm_.rank() - options_.direction, comm_.size()), " (span of rank ",
                     owner, ", ", payload.size(), " bytes) is corrupted: checksum ", checksum,
                     ", its owner computed ", hop_->arrived.payload_checksum);
}

void RingExchange::poll() noexcept {
  constexpr std::chrono::microseconds kPause{50};
  if (!hop_->is_active || failure_ || hop_->is_done()) return;
  const Clock::time_point now = Clock::now();
  if (now < next_poll_) return;
  next_poll_ = now + kPause;
  try_progress();
}

void RingExchange::try_progress() noexcept {
  if (failure_ || hop_->is_done()) return;
  try {
    progress();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void RingExchange::wait() {
  if (failure_) std::rethrow_exception(failure_);
  if (step_ == last_step()) return;
  invariant(hop_->is_active, place(), "wait() without post()");

  const Clock::time_point started = Clock::now();
  const Clock::time_point deadline = deadline_after(options_.timeout);
  try_progress();
  while (!failure_ && !hop_->is_done()) {
    if (Clock::now() >= deadline) {
      failure_ = std::make_exception_ptr(CommError(describe_late()));
      break;
    }
    std::this_thread::yield();
    try_progress();
  }
  stats_.exposed_seconds += Seconds(Clock::now() - started).count();
  if (failure_) std::rethrow_exception(failure_);

  current_checksum_ = hop_->arrived.payload_checksum;
  hop_->is_active = false;
  current_slot_ = 1 - current_slot_;
  ++step_;
  ++stats_.hops;
}

std::string RingExchange::describe_late() const {
  const int next = modulo(comm_.rank() + options_.direction, comm_.size());
  const int previous = modulo(comm_.rank() - options_.direction, comm_.size());
  if (!hop_->is_receive_done()) {
    const std::size_t bytes = span_bytes_[owner_at(step_ + 1)];
    std::string text = late_text(
        comm_.rank(), {.what = "ring hop", .step = step_, .peer = previous, .bytes = bytes},
        options_.timeout);
    return hop_->is_header_in ? text + "; its header did arrive" : text;
  }
  return late_text(
      comm_.rank(),
      {.what = "ring hop", .step = step_, .peer = next, .bytes = current().size(), .is_send = true},
      options_.timeout);
}

}  // namespace cpattn
