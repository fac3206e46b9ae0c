// Group: the ranks that share a sequence, and where their shards are, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "cp/gpu_group.h"
#include "src/comm/communicator.h"

namespace cpattn::python {

namespace py = pybind11;

class Group {
 public:
  Group(std::shared_ptr<Communicator> comm, int local_ranks)
      : comm_(std::move(comm)), local_ranks_(local_ranks) {}
  /// The same ranks with their shards on a GPU each, `ordinal` on this one.
  Group(const Group& ranks, std::shared_ptr<GpuGroup> gpu, int ordinal)
      : comm_(ranks.comm_),
        local_ranks_(ranks.local_ranks_),
        is_used_(ranks.is_used_),
        gpu_(std::move(gpu)),
        ordinal_(ordinal) {}
  /// Waits for hops on a GPU, which may wait for work that calls Python.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  Communicator& comm() const { return *comm_; }
  const std::shared_ptr<Communicator>& shared() const { return comm_; }
  int local_ranks() const { return local_ranks_; }

  /// Null: shards are in host memory.
  const std::shared_ptr<GpuGroup>& gpu() const { return gpu_; }
  std::shared_ptr<ShardTransport> shards() const {
    if (gpu_ != nullptr) return gpu_;
    return comm_;
  }
  /// The GPU's; -1: shards are in host memory.
  int ordinal() const { return ordinal_; }
  /// Of the GPU, for callers on the legacy default stream; made when first asked for.
  Stream own_stream();

  /// Held while a call talks to the peers: a second thread is refused, not interleaved.
  class Use {
   public:
    explicit Use(Group& group);
    ~Use() { *group_.is_used_ = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    Group& group_;
  };

  /// Collective. Every rank passes what it refuses ("" for nothing); InvalidArgument on all of them
  /// when any refused. Then compares `lines` as agree() does.
  void agree(const std::string& lines, const std::string& complaint, Seconds timeout);

 private:
  std::shared_ptr<Communicator> comm_;
  int local_ranks_;
  // Of the communicator, whichever group it is used by.
  std::shared_ptr<std::atomic<bool>> is_used_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<GpuGroup> gpu_;
  int ordinal_ = -1;
  std::unique_ptr<OwnedStream> own_stream_;
};

/// What `body` throws, in one line; "" when it throws nothing. For checks of what one rank passed
/// to a collective call: a rank that threw alone would be a hang for the others.
template <class Body>
std::string complaint_of(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    const std::string text = error.what();
    return text.substr(0, text.find('\n'));
  }
  return "";
}

void bind_group(py::module_& module);

}  // namespace cpattn::python
