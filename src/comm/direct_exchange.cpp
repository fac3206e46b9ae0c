#include "src/comm/direct_exchange.h"

#include <utility>

#include "src/base/error.h"

namespace cpattn {

DirectExchange::DirectExchange(ShardTransport& transport, std::size_t max_bytes_out,
                               std::size_t max_bytes_in, const TransferOptions& options)
    : comm_(transport.control()),
      out_{transport.device().allocate(max_bytes_out), transport.device().allocate(max_bytes_out)},
      in_(transport.device().allocate(max_bytes_in)),
      transfer_(transport.make_transfer(ExchangeKind::direct, options)) {}

DirectExchange::~DirectExchange() {
  if (!transfer_->is_in_flight()) return;
  // A failure left messages posted: the transport may still read or write these bytes.
  for (Buffer& buffer : out_) comm_.keep_until_end(std::move(buffer));
  comm_.keep_until_end(std::move(in_));
}

void DirectExchange::reset() {
  transfer_->rethrow();
  invariant(!transfer_->is_active(), "rank ", comm_.rank(), ": reset() while a hop is in flight");
  next_out_ = 0;
}

void DirectExchange::post(const DirectHop& hop, Stream stream) {
  transfer_->rethrow();
  require(hop.bytes_out <= outgoing().size() && hop.bytes_in <= in_.size_bytes(), "rank ",
          comm_.rank(), ": step ", hop.step, ": direct exchange: ", hop.bytes_out, " bytes out, ",
          hop.bytes_in, " in, expected at most ", outgoing().size(), " and ", in_.size_bytes());
  const std::span<const std::byte> out = outgoing().first(hop.bytes_out);
  transfer_->start({.step = hop.step,
                    .to = hop.to,
                    .subject_out = comm_.rank(),
                    .out = out,
                    .from = hop.from,
                    .subject_in = hop.from,
                    .in = in_.bytes().first(hop.bytes_in)},
                   stream);
  bytes_in_ = hop.bytes_in;
  next_out_ = 1 - next_out_;
}

}  // namespace cpattn
