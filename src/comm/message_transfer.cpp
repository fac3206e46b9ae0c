#include "src/comm/message_transfer.h"

#include <cstring>
#include <thread>

#include "src/base/digest.h"
#include "src/base/error.h"

namespace cpattn {
namespace {

constexpr std::uint64_t kMagic = 0x31676e6972706363ull;  // "ccpring1" in memory order

struct TransferHeader {
  std::uint64_t magic = kMagic;
  std::uint64_t hop = 0;               ///< counted over the life of the exchange
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

}  // namespace

// Every step is a bijection of the state for a given word, and of the word for a given state.
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

std::chrono::microseconds transfer_delay(std::uint64_t delay_seed, int rank, int step) {
  constexpr std::uint64_t kMaxDelay_us = 2000;
  if (delay_seed == 0) return std::chrono::microseconds(0);
  Digest digest;
  digest.add(static_cast<std::int64_t>(delay_seed));
  digest.add(static_cast<std::int64_t>(rank));
  digest.add(static_cast<std::int64_t>(step));
  return std::chrono::microseconds((digest.value() >> 20) % (kMaxDelay_us + 1));
}

MessageTransfer::MessageTransfer(Communicator& comm, ExchangeKind kind,
                                 const TransferOptions& options)
    : comm_(comm),
      header_tag_(kind == ExchangeKind::ring ? Tag::ring_header : Tag::direct_header),
      payload_tag_(kind == ExchangeKind::ring ? Tag::ring_payload : Tag::direct_payload),
      what_(kind == ExchangeKind::ring ? "ring hop" : "direct hop"),
      options_(options),
      headers_(2 * sizeof(TransferHeader)) {}

MessageTransfer::~MessageTransfer() {
  // A failure left messages posted: the transport may still read or write these bytes.
  if (is_in_flight()) comm_.keep_until_end(std::move(headers_));
}

bool MessageTransfer::is_in_flight() const {
  return header_in_.is_active() || payload_in_.is_active() || !is_send_done();
}

void MessageTransfer::rethrow() const {
  if (failure_) std::rethrow_exception(failure_);
}

TransferPlace MessageTransfer::place() const { return {comm_.rank(), ends_.step}; }

void MessageTransfer::start(const TransferEnds& ends, Stream) {
  rethrow();
  invariant(!is_active_, place(), what_, " started twice without wait()");
  ends_ = ends;
  is_active_ = true;
  is_posted_ = false;
  is_header_in_ = false;
  if (options_.verify_checksum && !ends_.checksum_out) ends_.checksum_out = checksum_of(ends_.out);
  if (options_.delay_seed != 0) {
    post_at_ = Clock::now() + transfer_delay(options_.delay_seed, comm_.rank(), ends.step);
    return;
  }
  post_messages();
}

void MessageTransfer::post_messages() {
  const auto header_out = headers_.bytes().first(sizeof(TransferHeader));
  const auto header_in = headers_.bytes().last(sizeof(TransferHeader));
  TransferHeader header{.hop = static_cast<std::uint64_t>(stats_.hops),
                        .owner = static_cast<std::uint64_t>(ends_.subject_out),
                        .bytes = ends_.out.size(),
                        .payload_checksum = ends_.checksum_out.value_or(0)};
  header.header_checksum = header.expected_checksum();
  std::memcpy(header_out.data(), &header, sizeof header);

  is_posted_ = true;
  header_in_ = comm_.irecv(header_in, ends_.from, header_tag_);
  payload_in_ = comm_.irecv(ends_.in, ends_.from, payload_tag_);
  header_out_ = comm_.isend(header_out, ends_.to, header_tag_);
  payload_out_ = comm_.isend(ends_.out, ends_.to, payload_tag_);
  stats_.messages_posted += 4;
  stats_.bytes_sent += ends_.out.size();
}

void MessageTransfer::progress() {
  if (!is_posted_) {
    if (Clock::now() < post_at_) return;
    post_messages();
  }
  // The payload is looked at only after its header, so that a wrong length is reported by what the
  // peer says it sent, not by what the transport makes of it.
  if (header_in_.is_active() && comm_.test(header_in_)) verify_header();
  if (is_header_in_ && payload_in_.is_active() && comm_.test(payload_in_)) verify_payload();
  if (header_out_.is_active()) comm_.test(header_out_);
  if (payload_out_.is_active()) comm_.test(payload_out_);
}

void MessageTransfer::verify_header() {
  TransferHeader header;
  std::memcpy(&header, headers_.bytes().last(sizeof header).data(), sizeof header);
  const auto owner = static_cast<std::uint64_t>(ends_.subject_in);
  const auto hop = static_cast<std::uint64_t>(stats_.hops);
  const int peer = ends_.from;

  require<CommError>(header.magic == kMagic && header.header_checksum == header.expected_checksum(),
                     place(), "the header from rank ", peer, " is corrupted");
  require<CommError>(header.hop == hop, place(), "rank ", peer, " sent hop ", header.hop,
                     ", expected hop ", hop);
  require<CommError>(header.owner == owner, place(), "rank ", peer, " sent the span of rank ",
                     header.owner, ", expected that of rank ", owner);
  require<CommError>(header.bytes == ends_.in.size(), place(), "rank ", peer, " sent ",
                     header.bytes, " bytes, expected ", ends_.in.size());
  arrived_checksum_ = header.payload_checksum;
  is_header_in_ = true;
}

void MessageTransfer::verify_payload() const {
  if (!options_.verify_checksum) return;
  const std::uint64_t checksum = checksum_of(ends_.in);
  require<CommError>(checksum == arrived_checksum_, place(), "the payload from rank ", ends_.from,
                     " (span of rank ", ends_.subject_in, ", ", ends_.in.size(),
                     " bytes) is corrupted: checksum ", checksum, ", its owner computed ",
                     arrived_checksum_);
}

void MessageTransfer::poll() noexcept {
  constexpr std::chrono::microseconds kPause{50};
  if (!is_active_ || failure_ || is_done()) return;
  const Clock::time_point now = Clock::now();
  if (now < next_poll_) return;
  next_poll_ = now + kPause;
  try_progress();
}

void MessageTransfer::try_progress() noexcept {
  if (failure_ || is_done()) return;
  try {
    progress();
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void MessageTransfer::wait(Stream) {
  rethrow();
  invariant(is_active_, place(), what_, ": wait() without start()");

  const Clock::time_point started = Clock::now();
  const Clock::time_point deadline = deadline_after(options_.timeout);
  try_progress();
  while (!failure_ && !is_done()) {
    if (Clock::now() >= deadline) {
      failure_ = std::make_exception_ptr(CommError(describe_late()));
      break;
    }
    std::this_thread::yield();
    try_progress();
  }
  stats_.exposed_seconds += Seconds(Clock::now() - started).count();
  rethrow();
  is_active_ = false;
  ++stats_.hops;
}

std::string MessageTransfer::describe_late() const {
  if (is_receive_done()) {
    return late_text(comm_.rank(),
                     {.what = what_,
                      .step = ends_.step,
                      .peer = ends_.to,
                      .bytes = ends_.out.size(),
                      .is_send = true},
                     options_.timeout);
  }
  const std::string text =
      late_text(comm_.rank(),
                {.what = what_, .step = ends_.step, .peer = ends_.from, .bytes = ends_.in.size()},
                options_.timeout);
  return is_header_in_ ? text + "; its header did arrive" : text;
}

}  // namespace cpattn
