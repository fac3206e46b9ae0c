#include "cp/gpu_group.h"

#include <algorithm>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/base/error.h"
#include "src/comm/transfer.h"

namespace cpattn {
namespace {

constexpr std::string_view kDeviceCheck = "GPU check";

/// Why a rank has no GPU to bring, by kind: what any rank is to blame for comes before what any
/// machine lacks, so that all ranks throw the same.
enum class Cause : char { none, device, unsupported, argument };

struct Opened {
  std::shared_ptr<CudaBackend> backend;
  std::shared_ptr<Device> device;
  Cause cause = Cause::none;
  std::string problem;
};

Opened open(const GpuOptions& options) {
  Opened opened;
  try {
    require(options.exchange != GpuExchange::host || options.nccl_comm == nullptr,
            "nccl_comm is set, expected none with exchange host");
    opened.backend = CudaBackend::open(options.backend);
    const std::string refusal = opened.backend->refusal();
    require<Unsupported>(refusal.empty(), "cuda:", options.device, ": ", refusal);
    opened.device = opened.backend->open_device(options.device, options.allocator);
  } catch (const InvalidArgument& error) {
    opened.cause = Cause::argument;
    opened.problem = error.what();
  } catch (const Unsupported& error) {
    opened.cause = Cause::unsupported;
    opened.problem = error.what();
  } catch (const std::exception& error) {
    opened.cause = Cause::device;
    opened.problem = error.what();
  }
  return opened;
}

Cause worst_cause(Communicator& control, Cause mine, Clock::time_point deadline) {
  const auto all = control.all_gather(std::as_bytes(std::span(&mine, 1)), deadline, kDeviceCheck);
  Cause worst = Cause::none;
  for (const auto& theirs : all)
    worst = std::max(worst, static_cast<Cause>(std::to_integer<char>(theirs.at(0))));
  return worst;
}

/// refuse_together() of one kind of error for all.
void require_all(Communicator& control, const Opened& mine, Clock::time_point deadline) {
  const Cause worst = worst_cause(control, mine.cause, deadline);
  try {
    refuse_together(control, mine.problem, deadline, kDeviceCheck);
  } catch (const InvalidArgument& refusal) {
    if (worst == Cause::unsupported) throw Unsupported(refusal.what());
    if (worst == Cause::device) throw DeviceError(refusal.what());
    throw;
  }
}

/// Whether every rank has a GPU of its own; the same answer on all of them.
bool has_one_each(Communicator& control, const Device& device, Clock::time_point deadline) {
  const auto uuids =
      control.all_gather(std::as_bytes(std::span(device.uuid())), deadline, kDeviceCheck);
  std::set<std::string> different;
  for (const auto& uuid : uuids)
    different.emplace(reinterpret_cast<const char*>(uuid.data()), uuid.size());
  return different.size() == uuids.size();
}

}  // namespace

std::shared_ptr<GpuGroup> GpuGroup::make(std::shared_ptr<Communicator> control,
                                         const GpuOptions& options) {
  require(control != nullptr, "control is null: expected a communicator");
  const Clock::time_point deadline = deadline_after(options.timeout);
  const Opened mine = open(options);
  require_all(*control, mine, deadline);
  agree(*control,
        detail::concat("exchange=", name_of(options.exchange),
                       "\nnccl_comm=", options.nccl_comm == nullptr ? "none" : "given", '\n'),
        deadline);
  const bool is_open = options.exchange == GpuExchange::automatic && options.nccl_comm == nullptr;
  const bool is_nccl = is_open ? has_one_each(*control, *mine.device, deadline)
                               : options.exchange != GpuExchange::host;
  auto shards = is_nccl ? mine.backend->nccl_transport(control, mine.device, options.nccl_comm,
                                                       options.timeout)
                        : mine.backend->host_transport(control, mine.device);
  return std::shared_ptr<GpuGroup>(
      new GpuGroup(std::move(control), mine.backend, mine.device, std::move(shards)));
}

void GpuGroup::refuse(Communicator& control, std::string_view why) {
  Opened nothing;
  nothing.cause = Cause::argument;
  nothing.problem = why.empty() ? "refused" : why;
  require_all(control, nothing, deadline_after(GpuOptions().timeout));
}

GpuGroup::GpuGroup(std::shared_ptr<Communicator> control, std::shared_ptr<CudaBackend> backend,
                   std::shared_ptr<Device> device, std::shared_ptr<ShardTransport> shards)
    : control_(std::move(control)),
      backend_(std::move(backend)),
      device_(std::move(device)),
      shards_(std::move(shards)),
      kernels_(&backend_->kernels(device_)) {}

std::unique_ptr<Transfer> GpuGroup::make_transfer(ExchangeKind kind,
                                                  const TransferOptions& options) {
  return shards_->make_transfer(kind, options);
}

}  // namespace cpattn
