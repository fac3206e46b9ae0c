#include "src/comm/nccl_transport.h"

#include <set>
#include <thread>
#include <utility>

#include "src/comm/transfer.h"

namespace cpattn {
namespace {

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class NcclTransfer final : public Transfer {
 public:
  NcclTransfer(std::shared_ptr<NcclQueue> queue, const Communicator& control,
               const CudaDevice& device, const TransferOptions& options)
      : queue_(std::move(queue)), control_(control), device_(device), options_(options) {
    const DeviceGuard guard(device.ordinal());
    ready_ = make_cuda_event();
    done_ = make_cuda_event();
  }

  bool is_active() const override { return is_active_; }
  /// Device memory is given back only when the device is idle, and then nothing uses it.
  bool is_in_flight() const override { return false; }
  void rethrow() const override { queue_->rethrow(); }
  void start(const TransferEnds& ends, Stream stream) override;
  /// NCCL needs no help of the host, and errors are found by the thread that watches.
  void poll() noexcept override {}
  void wait(Stream stream) override;
  std::uint64_t arrived_checksum() const override { return 0; }
  const TransferStats& stats() const override { return stats_; }

 private:
  std::shared_ptr<NcclQueue> queue_;
  const Communicator& control_;
  const CudaDevice& device_;
  TransferOptions options_;
  CudaEvent ready_, done_;
  int step_ = 0;
  bool is_active_ = false;
  TransferStats stats_;
};

void NcclTransfer::start(const TransferEnds& ends, Stream stream) {
  invariant(!is_active_, TransferPlace{control_.rank(), ends.step},
            "NCCL transfer started twice without wait()");
  const auto delay = transfer_delay(options_.delay_seed, control_.rank(), ends.step);
  if (delay.count() > 0 && !device_.is_capturing(stream)) std::this_thread::sleep_for(delay);
  queue_->put({.step = ends.step,
               .to = ends.to,
               .out = ends.out,
               .from = ends.from,
               .in = ends.in,
               .timeout = options_.timeout},
              handle_of(stream), ready_, done_);
  step_ = ends.step;
  is_active_ = true;
  stats_.messages_posted += 2;
  stats_.bytes_sent += ends.out.size();
}

void NcclTransfer::wait(Stream stream) {
  rethrow();
  invariant(is_active_, TransferPlace{control_.rank(), step_},
            "NCCL transfer: wait() without start()");
  cuda_check(cudaStreamWaitEvent(handle_of(stream), done_.get(), cudaEventWaitDefault),
             "cudaStreamWaitEvent");
  is_active_ = false;
  ++stats_.hops;
}

}  // namespace

NcclTransport::NcclTransport(std::shared_ptr<Communicator> control,
                             std::shared_ptr<CudaDevice> device, NcclCommunicator communicator)
    : control_(std::move(control)),
      device_(std::move(device)),
      queue_(std::make_shared<NcclQueue>(std::move(communicator), *device_)) {}

NcclTransport::~NcclTransport() = default;

std::unique_ptr<Transfer> NcclTransport::make_transfer(ExchangeKind kind,
                                                       const TransferOptions& options) {
  require(!options.verify_checksum, "rank ", control_->rank(),
          ": verify_checksum: the host does not see what NCCL moves");
  const int rank = control_->rank(), size = control_->size();
  std::set<int> peers;
  for (int distance = 1; distance < size; ++distance) {
    const bool is_neighbour = distance == 1 || distance == size - 1;
    if (kind == ExchangeKind::direct || is_neighbour) peers.insert((rank + distance) % size);
  }
  control_->barrier(deadline_after(options.timeout), "NCCL connection");  // names who does not come
  queue_->connect(peers, options.timeout);
  return std::make_unique<NcclTransfer>(queue_, *control_, *device_, options);
}

void NcclTransport::synchronize(Stream stream, Clock::time_point deadline) {
  require(!device_->is_capturing(stream), "rank ", control_->rank(),
          ": stream: in capture, expected one whose work runs");
  queue_->synchronize(handle_of(stream), deadline);
}

}  // namespace cpattn
