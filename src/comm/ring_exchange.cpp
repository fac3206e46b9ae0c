#include "src/comm/ring_exchange.h"

#include <algorithm>
#include <utility>

#include "src/base/error.h"

namespace cpattn {
namespace {

int modulo(int value, int size) { return ((value % size) + size) % size; }

}  // namespace

RingExchange::RingExchange(ShardTransport& transport, std::vector<std::size_t> span_bytes,
                           const RingOptions& options)
    : comm_(transport.control()),
      span_bytes_(std::move(span_bytes)),
      options_(options),
      hop_(transport.make_transfer(
          ExchangeKind::ring, {options.timeout, options.verify_checksum, options.delay_seed})) {
  require(span_bytes_.size() == static_cast<std::size_t>(comm_.size()), "rank ", comm_.rank(),
          ": ring exchange: ", span_bytes_.size(), " span sizes for ", comm_.size(), " ranks");
  require(options.direction == 1 || options.direction == -1, "rank ", comm_.rank(),
          ": ring exchange: direction ", options.direction, ", expected 1 or -1");
  const std::size_t slot_bytes = *std::max_element(span_bytes_.begin(), span_bytes_.end());
  slots_[0] = transport.device().allocate(slot_bytes);
  if (comm_.size() > 1) slots_[1] = transport.device().allocate(slot_bytes);
}

RingExchange::~RingExchange() {
  if (!hop_->is_in_flight()) return;
  // A failure left messages posted: the transport may still read or write these bytes.
  comm_.keep_until_end(std::move(slots_[0]));
  comm_.keep_until_end(std::move(slots_[1]));
}

std::size_t RingExchange::workspace_bytes(std::span<const std::size_t> span_bytes) {
  if (span_bytes.empty()) return 0;
  const std::size_t largest = *std::max_element(span_bytes.begin(), span_bytes.end());
  return span_bytes.size() == 1 ? largest : 2 * largest;
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

const RingStats& RingExchange::stats() const { return hop_->stats(); }

TransferPlace RingExchange::place() const { return {comm_.rank(), step_}; }

void RingExchange::post(Stream stream) {
  hop_->rethrow();
  if (step_ == last_step()) return;
  invariant(!hop_->is_active(), place(), "post() twice without wait()");

  const int next_owner = owner_at(step_ + 1);
  hop_->start({.step = step_,
               .to = modulo(comm_.rank() + options_.direction, comm_.size()),
               .subject_out = current_owner(),
               .out = current(),
               .checksum_out = current_checksum_,
               .from = modulo(comm_.rank() - options_.direction, comm_.size()),
               .subject_in = next_owner,
               .in = slots_[1 - current_slot_].bytes().first(span_bytes_[next_owner])},
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
