#include "src/comm/staged_transport.h"

#include <exception>
#include <thread>
#include <utility>

#include "src/base/error.h"
#include "src/comm/message_transfer.h"
#include "src/device/cuda_handles.h"

namespace cpattn {
namespace {

constexpr std::chrono::microseconds kPollPause{20};

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

class StagedTransfer final : public Transfer {
 public:
  StagedTransfer(Communicator& control, const CudaDevice& device, MessageMemory memory,
                 ExchangeKind kind, const TransferOptions& options)
      : control_(control), device_(device), memory_(memory), messages_(control, kind, options) {
    const DeviceGuard guard(device.ordinal());
    copies_ = make_cuda_stream();
    ready_ = make_cuda_event();
    copied_ = make_cuda_event();
  }
  ~StagedTransfer() override;

  bool is_active() const override { return is_active_; }
  bool is_in_flight() const override {
    return memory_ == MessageMemory::device && messages_.is_in_flight();
  }
  void rethrow() const override {
    if (failure_) std::rethrow_exception(failure_);
    messages_.rethrow();
  }
  void start(const TransferEnds& ends, Stream stream) override;
  void poll() noexcept override;
  void wait(Stream stream) override;
  std::uint64_t arrived_checksum() const override { return messages_.arrived_checksum(); }
  const TransferStats& stats() const override { return messages_.stats(); }

 private:
  std::span<std::byte> bounce(Buffer& buffer, std::size_t size_bytes);
  bool is_ready();
  void hand_over();

  Communicator& control_;
  const CudaDevice& device_;
  MessageMemory memory_;
  CudaStream copies_;
  CudaEvent ready_, copied_;
  Buffer out_, in_;  // pinned
  MessageTransfer messages_;
  TransferEnds ends_;     // of the device
  TransferEnds message_;  // of what the messages move
  bool is_active_ = false;
  bool is_handed_over_ = false;
  std::exception_ptr failure_;
};

StagedTransfer::~StagedTransfer() {
  cudaStreamSynchronize(copies_.get());  // copies may be under way after a failure
  if (!messages_.is_in_flight()) return;
  control_.keep_until_end(std::move(out_));
  control_.keep_until_end(std::move(in_));
}

std::span<std::byte> StagedTransfer::bounce(Buffer& buffer, std::size_t size_bytes) {
  if (buffer.size_bytes() < size_bytes) {
    cuda_check(cudaStreamSynchronize(copies_.get()), "cudaStreamSynchronize");
    buffer = device_.allocate_pinned(size_bytes);
  }
  return buffer.bytes().first(size_bytes);
}

// The stream of copies follows the compute stream, so its last copy into the device of an earlier
// hop is done, too, when the host sees this event.
void StagedTransfer::start(const TransferEnds& ends, Stream stream) {
  rethrow();
  invariant(!is_active_, TransferPlace{control_.rank(), ends.step},
            "staged transfer started twice without wait()");
  const DeviceGuard guard(device_.ordinal());
  ends_ = message_ = ends;
  order_streams(handle_of(stream), ready_, copies_.get());
  if (memory_ == MessageMemory::pinned_host) {
    message_.out = bounce(out_, ends.out.size());
    message_.in = bounce(in_, ends.in.size());
    if (!ends.out.empty()) {
      cuda_check(cudaMemcpyAsync(out_.data(), ends.out.data(), ends.out.size(),
                                 cudaMemcpyDeviceToHost, copies_.get()),
                 "cudaMemcpyAsync to the host");
    }
  }
  cuda_check(cudaEventRecord(copied_.get(), copies_.get()), "cudaEventRecord");
  is_active_ = true;
  is_handed_over_ = false;
}

bool StagedTransfer::is_ready() {
  const CaptureBystander bystander;
  return is_cuda_done(cudaEventQuery(copied_.get()), "cudaEventQuery");
}

void StagedTransfer::hand_over() {
  messages_.start(message_, {});
  is_handed_over_ = true;
}

void StagedTransfer::poll() noexcept {
  if (!is_active_ || failure_) return;
  try {
    if (!is_handed_over_ && is_ready()) hand_over();
  } catch (...) {
    failure_ = std::current_exception();
  }
  if (is_handed_over_) messages_.poll();
}

void StagedTransfer::wait(Stream stream) {
  rethrow();
  invariant(is_active_, TransferPlace{control_.rank(), ends_.step},
            "staged transfer: wait() without start()");
  const DeviceGuard guard(device_.ordinal());
  while (!is_handed_over_) {
    if (is_ready()) {
      hand_over();
    } else {
      std::this_thread::sleep_for(kPollPause);
    }
  }
  messages_.wait({});
  if (memory_ == MessageMemory::pinned_host && !ends_.in.empty()) {
    cuda_check(cudaMemcpyAsync(ends_.in.data(), in_.data(), ends_.in.size(), cudaMemcpyHostToDevice,
                               copies_.get()),
               "cudaMemcpyAsync to the device");
    order_streams(copies_.get(), copied_, handle_of(stream));
  }
  is_active_ = false;
}

}  // namespace

StagedTransport::StagedTransport(std::shared_ptr<Communicator> control,
                                 std::shared_ptr<CudaDevice> device, MessageMemory memory)
    : control_(std::move(control)), device_(std::move(device)), memory_(memory) {
  const bool is_staged = memory == MessageMemory::pinned_host;
  require<Unsupported>(is_staged || control_->takes_device_memory(), "transport ",
                       control_->transport(), " does not take device memory: stage it");
  name_ = detail::concat(control_->transport(), is_staged ? ", staged" : ", cuda-aware");
}

std::unique_ptr<Transfer> StagedTransport::make_transfer(ExchangeKind kind,
                                                         const TransferOptions& options) {
  require(!options.verify_checksum || can_verify_checksums(), "rank ", control_->rank(),
          ": verify_checksum: the host does not see device memory that transport ", name_,
          " moves");
  return std::make_unique<StagedTransfer>(*control_, *device_, memory_, kind, options);
}

void StagedTransport::synchronize(Stream stream, Clock::time_point deadline) {
  require(!device_->is_capturing(stream), "rank ", control_->rank(),
          ": stream: in capture, expected one whose work runs");
  const Clock::time_point begin = Clock::now();
  const CaptureBystander bystander;
  while (!is_cuda_done(cudaStreamQuery(handle_of(stream)), "cudaStreamQuery")) {
    require<CommError>(Clock::now() < deadline, "rank ", control_->rank(),
                       ": stream: not done within ", Seconds(deadline - begin).count(), " s");
    std::this_thread::sleep_for(kPollPause);
  }
}

}  // namespace cpattn
