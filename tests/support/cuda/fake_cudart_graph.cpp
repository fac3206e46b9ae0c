// The runtime's functions of captures and graphs.
//
// An instantiated graph is a set of branches, each a chain in which every node waits for the one
// before it; between branches, a node waits for exactly the nodes it comes after. Branches run at
// once, the first in the launching stream, each other one in a Worker. No lock is common to them,
// so that the thread sanitizer sees only the order that the graph gives.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/support/cuda/fake_capture.h"
#include "tests/support/cuda/fake_state.h"
#include "tests/support/cuda/fake_stream.h"

using namespace cpattn::fake_cuda;

struct CUgraph_st {
  std::vector<Node> nodes;
};

struct CUgraphExec_st : Shared {
  explicit CUgraphExec_st(std::vector<Node> graph_nodes);

  /// On a stream's thread: runs everything.
  void run();

  std::mutex mutex;              ///< of hosts that launch it
  Completion* latest = nullptr;  ///< launches of one graph follow one another

 private:
  void run_branch(const std::vector<int>& branch, Signal* is_done) const;

  const std::vector<Node> nodes_;
  std::vector<std::vector<int>> branches_;
  std::vector<std::unique_ptr<Worker>> workers_;  ///< of all branches but the first
};

CUgraphExec_st::CUgraphExec_st(std::vector<Node> graph_nodes) : nodes_(std::move(graph_nodes)) {
  std::vector<int> branch_ending_at(nodes_.size(), -1);
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    int branch = -1;
    for (const int before : nodes_[node].after) {
      int& candidate = branch_ending_at[static_cast<std::size_t>(before)];
      if (branch < 0) branch = std::exchange(candidate, -1);
    }
    if (branch < 0) {
      branch = static_cast<int>(branches_.size());
      branches_.emplace_back();
    }
    branches_[static_cast<std::size_t>(branch)].push_back(static_cast<int>(node));
    branch_ending_at[node] = branch;
  }
  for (std::size_t i = 1; i < branches_.size(); ++i) workers_.push_back(std::make_unique<Worker>());
}

void CUgraphExec_st::run_branch(const std::vector<int>& branch, Signal* is_done) const {
  for (const int number : branch) {
    const Node& node = nodes_[static_cast<std::size_t>(number)];
    for (const int before : node.after) is_done[before].wait();
    perform(node.device, node.operation);
    is_done[number].set();
  }
}

void CUgraphExec_st::run() {
  if (branches_.empty()) return;
  const auto is_done = std::make_unique<Signal[]>(nodes_.size());
  for (std::size_t i = 1; i < branches_.size(); ++i) {
    workers_[i - 1]->push(
        [this, i, signals = is_done.get()] { run_branch(branches_[i], signals); });
  }
  run_branch(branches_[0], is_done.get());
  for (const std::unique_ptr<Worker>& worker : workers_) worker->wait();
}

namespace {

cudaError_t launch_graph(CUgraphExec_st& exec, Stream& stream) {
  if (stream.is_capturing()) return refuse_in_capture(stream, "cudaGraphLaunch");
  Completion* const mine = Completion::make();
  Completion* previous = nullptr;
  {
    const std::lock_guard lock(exec.mutex);
    previous = std::exchange(exec.latest, mine);
  }
  stream.worker->push([share = Ref<CUgraphExec_st>(&exec), mine, previous] {
    if (previous != nullptr) previous->signal.wait();
    share->run();
    mine->signal.set();
  });
  return cudaSuccess;
}

cudaError_t instantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags) {
  if (graph == nullptr || flags != 0) {
    return refuse(cudaErrorInvalidValue, "cudaGraphInstantiate: no graph, or flags");
  }
  *exec = new CUgraphExec_st(graph->nodes);
  (*exec)->retain();
  add(counts().graph_execs, 1);
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamBeginCapture",
                       [&](Stream& stream) { return begin_capture(stream, mode); });
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  static Api& api = Api::named(__func__);
  *graph = nullptr;
  return api.call([&] {
    return with_stream(handle, "cudaStreamEndCapture", [&](Stream& stream) {
      std::vector<Node> nodes;
      const cudaError_t error = end_capture(stream, &nodes);
      if (error != cudaSuccess) return error;
      *graph = new CUgraph_st{std::move(nodes)};
      add(counts().graphs, 1);
      return cudaSuccess;
    });
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    return with_stream(handle, "cudaStreamIsCapturing", [&](const Stream& stream) {
      *status = capture_status(stream);
      return cudaSuccess;
    });
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* num) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (graph != nullptr || dependencies != nullptr || edges != nullptr || num != nullptr) {
      return refuse(cudaErrorNotSupported, "cudaStreamGetCaptureInfo: tells status and id only");
    }
    return with_stream(handle, "cudaStreamGetCaptureInfo", [&](const Stream& stream) {
      *status = capture_status(stream);
      if (id != nullptr) *id = stream.capture.load(std::memory_order_relaxed);
      return cudaSuccess;
    });
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    *mode = exchange_capture_mode(*mode);
    return cudaSuccess;
  });
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* num) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (nodes != nullptr) return refuse(cudaErrorNotSupported, "cudaGraphGetNodes: counts only");
    *num = graph->nodes.size();
    return cudaSuccess;
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                 unsigned long long flags) {
  static Api& api = Api::named(__func__);
  return api.call([&] { return instantiate(exec, graph, flags); });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (exec == nullptr) return refuse(cudaErrorInvalidValue, "cudaGraphUpload: no graph");
    return with_stream(handle, "cudaGraphUpload", [](Stream& stream) {
      return stream.is_capturing() ? refuse_in_capture(stream, "cudaGraphUpload") : cudaSuccess;
    });
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  static Api& api = Api::named(__func__);
  return api.call([&] {
    if (exec == nullptr) return refuse(cudaErrorInvalidValue, "cudaGraphLaunch: no graph");
    return with_stream(handle, "cudaGraphLaunch",
                       [&](Stream& stream) { return launch_graph(*exec, stream); });
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  Api::named(__func__).enter();
  if (exec == nullptr) return Api::finish(cudaErrorInvalidValue);
  exec->release();  // a launch that is under way keeps it
  add(counts().graph_execs, -1);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Api::named(__func__).enter();
  if (graph == nullptr) return Api::finish(cudaErrorInvalidValue);
  delete graph;
  add(counts().graphs, -1);
  return cudaSuccess;
}
