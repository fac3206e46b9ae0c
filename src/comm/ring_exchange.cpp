#include "src/comm/ring_exchange.h"

#include <algorithm>
#include <utility>

#include "src/base/error.h"

namespace cpattn {
namespace {

int modulo(int value, int size) { return ((value % size) + size) % size; }

std::size_t slot_bytes(const RingBytes& bytes) {
  return bytes.held.empty() ? 0 : *std::max_element(bytes.held.begin(), bytes.held.end());
}

RingBytes checked_whole_spans(const Communicator& comm, std::span<const std::size_t> span_bytes,
                              int direction) {
  require(span_bytes.size() == static_cast<std::size_t>(comm.size()), "rank ", comm.rank(),
          ": ring exchange: ", span_bytes.size(), " span sizes for ", comm.size(), " ranks");
  return whole_spans(span_bytes, comm.rank(), direction);
}

}  // namespace

RingBytes whole_spans(std::span<const std::size_t> span_bytes, int rank, int direction) {
  const int world_size = static_cast<int>(span_bytes.size());
  RingBytes bytes;
  for (int step = 0; step < world_size; ++step) {
    const auto owner = static_cast<std::size_t>(modulo(rank - step * direction, world_size));
    bytes.held.push_back(span_bytes[owner]);
    bytes.passed_on.push_back(step + 1 < world_size ? span_bytes[owner] : 0);
  }
  return bytes;
}

RingExchange::RingExchange(ShardTransport& transport, const std::vector<std::size_t>& span_bytes,
                           const RingOptions& options)
    : RingExchange(transport,
                   checked_whole_spans(transport.control(), span_bytes, options.direction),
                   options) {}

RingExchange::RingExchange(ShardTransport& transport, RingBytes bytes, const RingOptions& options)
    : comm_(transport.control()),
      bytes_(std::move(bytes)),
      options_(options),
      hop_(transport.make_transfer(
          ExchangeKind::ring, {options.timeout, options.verify_checksum, options.delay_seed})) {
  const std::size_t steps = bytes_.held.size();
  require(steps >= 1 && steps <= static_cast<std::size_t>(comm_.size()) &&
              bytes_.passed_on.size() == steps,
          "rank ", comm_.rank(), ": ring exchange: sizes of ", steps, " and ",
          bytes_.passed_on.size(), " steps for ", comm_.size(), " ranks");
  require(options.direction == 1 || options.direction == -1, "rank ", comm_.rank(),
          ": ring exchange: direction ", options.direction, ", expected 1 or -1");
  slots_[0] = transport.device().allocate(slot_bytes(bytes_));
  if (steps > 1) slots_[1] = transport.device().allocate(slot_bytes(bytes_));
}

RingExchange::~RingExchange() {
  if (!hop_->is_in_flight()) return;
  // A failure left messages posted: the transport may still read or write these bytes.
  comm_.keep_until_end(std::move(slots_[0]));
  comm_.keep_until_end(std::move(slots_[1]));
}

std::size_t RingExchange::workspace_bytes(const RingBytes& bytes) {
  return bytes.held.size() <= 1 ? slot_bytes(bytes) : 2 * slot_bytes(bytes);
}

void RingExchange::reset() {
  hop_->rethrow();
  invariant(!hop_->is_active(), place(), "reset() while a hop is in flight");
  step_ = 0;
  current_slot_ = 0;
  current_checksum_.reset();
}

std::span<std::byte> RingExchange::own() {
  invariant(step_ == 0 && !hop_->is_active(), place(), "own() is writable at step 0 before post()");
  return slots_[current_slot_].bytes().first(bytes_.held[0]);
}

int RingExchange::step() const { return step_; }

int RingExchange::owner_at(int step) const {
  return modulo(comm_.rank() - step * options_.direction, comm_.size());
}

int RingExchange::current_owner() const { return owner_at(step_); }

std::span<const std::byte> RingExchange::current() const {
  return slots_[current_slot_].bytes().first(bytes_.held[static_cast<std::size_t>(step_)]);
}

const RingStats& RingExchange::stats() const { return hop_->stats(); }

TransferPlace RingExchange::place() const { return {comm_.rank(), step_}; }

void RingExchange::post(Stream stream) {
  hop_->rethrow();
  if (step_ == last_step()) return;
  invariant(!hop_->is_active(), place(), "post() twice without wait()");

  const auto now = static_cast<std::size_t>(step_);
  const std::span<const std::byte> out = current().first(bytes_.passed_on[now]);
  if (out.size() < current().size()) current_checksum_.reset();  // it is of more than that
  hop_->start({.step = step_,
               .to = modulo(comm_.rank() + options_.direction, comm_.size()),
               .subject_out = current_owner(),
               .out = out,
               .checksum_out = current_checksum_,
               .from = modulo(comm_.rank() - options_.direction, comm_.size()),
               .subject_in = owner_at(step_ + 1),
               .in = slots_[1 - current_slot_].bytes().first(bytes_.held[now + 1])},
              stream);
}

void RingExchange::poll() noexcept { hop_->poll(); }

void RingExchange::wait(Stream stream) {
  hop_->rethrow();
  if (step_ == last_step()) return;
  hop_->wait(stream);
  if (options_.verify_checksum) current_checksum_ = hop_->arrived_checksum();
  current_slot_ = 1 - current_slot_;
  ++step_;
}

}  // namespace cpattn
