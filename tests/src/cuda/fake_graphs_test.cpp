// The double of the runtime: captures, what they forbid, and graphs.
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/launch.h"
#include "tests/src/cuda/double_test.h"

namespace cpattn::fake_cuda {
namespace {

__global__ void add(int* value, int summand) {
  if (threadIdx.x == 0) *value += summand;
}

class Graphs : public DoubleTest {
 protected:
  void TearDown() override {
    for (cudaGraphExec_t exec : execs_) EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    DoubleTest::TearDown();
  }

  /// What `record` puts into the stream, as a graph that is given back when the test ends.
  cudaGraphExec_t capture(cudaStream_t origin, const std::function<void()>& record,
                          std::size_t* num_nodes = nullptr) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    record();
    EXPECT_EQ(cudaStreamEndCapture(origin, &graph), cudaSuccess) << complaint();
    EXPECT_EQ(cudaGraphInstantiate(&execs_.emplace_back(), graph, 0), cudaSuccess);
    if (num_nodes != nullptr) {
      EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, num_nodes), cudaSuccess);
    }
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return execs_.back();
  }

  void fork(cudaStream_t from, cudaStream_t to) {
    cudaEvent_t at = event();
    ASSERT_EQ(cudaEventRecord(at, from), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(to, at, 0), cudaSuccess);
  }

  int value_of(const int* device) {
    int value = -1;
    EXPECT_EQ(cudaMemcpy(&value, device, sizeof(int), cudaMemcpyDeviceToHost), cudaSuccess);
    return value;
  }

 private:
  std::vector<cudaGraphExec_t> execs_;
};

TEST_F(Graphs, RecordNowAndRunAtEveryLaunch) {
  cudaStream_t work = stream();
  auto* value = device_memory<int>(1);
  ASSERT_EQ(cudaMemset(value, 0, sizeof(int)), cudaSuccess);
  std::size_t num_nodes = 0;
  cudaGraphExec_t graph = capture(
      work,
      [&] {
        cuda::launch(add, dim3(1), dim3(32), 0, work, value, 3);
        cuda::launch(add, dim3(1), dim3(32), 0, work, value, 4);
        cudaStreamCaptureStatus status{};
        unsigned long long id = 0;
        EXPECT_EQ(cudaStreamGetCaptureInfo(work, &status, &id, nullptr, nullptr, nullptr, nullptr),
                  cudaSuccess);
        EXPECT_EQ(status, cudaStreamCaptureStatusActive);
        EXPECT_GT(id, 0u);
      },
      &num_nodes);
  EXPECT_EQ(num_nodes, 2u);
  cudaStreamCaptureStatus status{};
  EXPECT_EQ(cudaStreamIsCapturing(work, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  EXPECT_EQ(value_of(value), 0);

  for (int i = 1; i <= 3; ++i) {
    ASSERT_EQ(cudaGraphLaunch(graph, work), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
    EXPECT_EQ(value_of(value), 7 * i);
  }
}

TEST_F(Graphs, OfNothingRun) {
  cudaStream_t work = stream();
  cudaGraphExec_t graph = capture(work, [] {});
  EXPECT_EQ(cudaGraphUpload(graph, work), cudaSuccess);
  EXPECT_EQ(cudaGraphLaunch(graph, work), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(work), cudaSuccess);
}

TEST_F(Graphs, KeepTheOrderOfForksAndJoins) {
  set_delays(5, 300);
  cudaStream_t origin = stream(), left = stream(), right = stream();
  std::vector<int> trace_left, trace_right;
  int before = 0, after = 0;
  cudaGraphExec_t graph = capture(origin, [&] {
    run_in(origin, [&] { ++before; });
    fork(origin, left);
    fork(origin, right);
    for (int i = 0; i < 3; ++i) {
      run_in(left, [&, i] { trace_left.push_back(10 * before + i); });
      run_in(right, [&, i] { trace_right.push_back(10 * before + i); });
    }
    fork(right, left);
    run_in(left, [&] { trace_left.push_back(trace_right.back()); });
    fork(left, origin);
    run_in(origin, [&] { after = trace_left.back() + 100; });
  });

  for (int round = 1; round <= 5; ++round) {
    ASSERT_EQ(cudaGraphLaunch(graph, origin), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(origin), cudaSuccess);
    const int base = 10 * round;
    EXPECT_EQ(trace_left, (std::vector<int>{base, base + 1, base + 2, base + 2}));
    EXPECT_EQ(trace_right, (std::vector<int>{base, base + 1, base + 2}));
    EXPECT_EQ(after, base + 102);
    trace_left.clear();
    trace_right.clear();
  }
}

TEST_F(Graphs, RunBranchesAtOnce) {
  cudaStream_t origin = stream(), other = stream();
  std::atomic<int> num_here{0};
  const auto meet = [&] {
    num_here.fetch_add(1);
    while (num_here.load() < 2) std::this_thread::yield();
  };
  cudaGraphExec_t graph = capture(origin, [&] {
    fork(origin, other);
    run_in(origin, meet);
    run_in(other, meet);
    fork(other, origin);
  });

  ASSERT_EQ(cudaGraphLaunch(graph, origin), cudaSuccess);

  EXPECT_EQ(cudaStreamSynchronize(origin), cudaSuccess);
}

TEST_F(Graphs, MissingWaitBetweenBranchesIsFound) {
  cudaStream_t origin = stream(), other = stream();
  static int value = 0;
  const auto graph_with = [&](bool waits) {
    return capture(origin, [&, waits] {
      fork(origin, other);
      run_in(origin, [] { ++value; });
      if (waits) fork(origin, other);
      run_in(other, [] { ++value; });
      fork(other, origin);
    });
  };
  cudaGraphExec_t right = graph_with(true), wrong = graph_with(false);
  const auto launch = [&](cudaGraphExec_t graph) {
    ASSERT_EQ(cudaGraphLaunch(graph, origin), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(origin), cudaSuccess);
  };

  EXPECT_EQ(races_of([&] { launch(right); }), 0);
  EXPECT_EQ(races_of([&] { launch(wrong); }) > 0, kFindsRaces);
}

TEST_F(Graphs, LaunchesOfOneFollowOneAnother) {
  set_delays(7, 300);
  cudaStream_t first = stream(), second = stream();
  int num_inside = 0, most = 0;
  cudaGraphExec_t graph = capture(first, [&] {
    run_in(first, [&] { most = std::max(most, ++num_inside); });
    run_in(first, [&] { --num_inside; });
  });

  for (int i = 0; i < 5; ++i) {
    ASSERT_EQ(cudaGraphLaunch(graph, first), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(graph, second), cudaSuccess);
  }

  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(most, 1);
}

TEST_F(Graphs, ReadPageableMemoryAtReplay) {
  cudaStream_t work = stream();
  auto* value = device_memory<int>(1);
  int source = 1;
  cudaGraphExec_t graph = capture(work, [&] {
    ASSERT_EQ(cudaMemcpyAsync(value, &source, sizeof(int), cudaMemcpyHostToDevice, work),
              cudaSuccess);
  });
  source = 2;

  ASSERT_EQ(cudaGraphLaunch(graph, work), cudaSuccess);

  ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  EXPECT_EQ(value_of(value), 2);
}

TEST_F(Graphs, DestroyedOnesFinish) {
  cudaStream_t work = stream();
  std::atomic<bool> may_go{false}, is_done{false};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const auto mark = [](void* mark_of) { static_cast<std::atomic<bool>*>(mark_of)->store(true); };
  ASSERT_EQ(cudaLaunchHostFunc(work, mark, &is_done), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(work, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  run_in(work, [&] {
    while (!may_go.load()) std::this_thread::yield();
  });
  ASSERT_EQ(cudaGraphLaunch(exec, work), cudaSuccess);

  ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);

  may_go.store(true);
  EXPECT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  EXPECT_TRUE(is_done.load());
}

TEST_F(Graphs, CallsThatInvalidateACapture) {
  cudaStream_t work = stream(), other = stream();
  cudaEvent_t captured = event(), outside = event(), fresh = event();
  auto* value = device_memory<int>(1);
  ASSERT_EQ(cudaEventRecord(outside, other), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  cudaGraphExec_t graph = capture(work, [] {});
  void* memory = nullptr;
  int host = 0;
  const struct {
    const char* name;
    cudaError_t error;
    std::function<cudaError_t()> call;
  } kCalls[] = {
      {"synchronise", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaStreamSynchronize(work); }},
      {"query", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(work); }},
      {"another", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(other); }},
      {"device", cudaErrorStreamCaptureUnsupported, [] { return cudaDeviceSynchronize(); }},
      {"ask captured", cudaErrorCapturedEvent, [&] { return cudaEventQuery(captured); }},
      {"wait captured", cudaErrorCapturedEvent, [&] { return cudaEventSynchronize(captured); }},
      {"ask", cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(outside); }},
      {"malloc", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&memory, 1); }},
      {"pinned", cudaErrorStreamCaptureUnsupported, [&] { return cudaMallocHost(&memory, 1); }},
      {"free", cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(value); }},
      {"async", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMallocAsync(&memory, 1, work); }},
      {"copy", cudaErrorStreamCaptureUnsupported,
       [&] { return cudaMemcpy(&host, value, sizeof(int), cudaMemcpyDefault); }},
      {"fill", cudaErrorStreamCaptureUnsupported, [&] { return cudaMemset(value, 0, 1); }},
      {"legacy", cudaErrorStreamCaptureImplicit,
       [&] { return cudaMemsetAsync(value, 0, 1, nullptr); }},
      {"foreign event", cudaErrorStreamCaptureIsolation,
       [&] { return cudaStreamWaitEvent(work, outside, 0); }},
      {"graph", cudaErrorStreamCaptureUnsupported, [&] { return cudaGraphLaunch(graph, work); }},
  };
  for (const auto& [name, error, call] : kCalls) {
    SCOPED_TRACE(name);
    cudaGraph_t nothing = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeGlobal), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(captured, work), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(work, fresh, 0), cudaSuccess) << "never recorded: no wait";

    EXPECT_EQ(call(), error) << complaint();

    cudaStreamCaptureStatus status{};
    ASSERT_EQ(cudaStreamIsCapturing(work, &status), cudaSuccess);
    EXPECT_EQ(status, cudaStreamCaptureStatusInvalidated);
    EXPECT_EQ(cudaMemsetAsync(value, 0, 1, work), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(work, &nothing), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(nothing, nullptr);
    EXPECT_EQ(cudaMemsetAsync(value, 0, 1, work), cudaSuccess) << "over";
    ASSERT_EQ(cudaStreamSynchronize(work), cudaSuccess);
  }
}

TEST_F(Graphs, ModesDecideWhomACaptureForbidsWhat) {
  cudaStream_t work = stream();
  const auto is_allowed_elsewhere = [] {
    cudaError_t error = cudaSuccess;
    std::thread([&] {
      void* memory = nullptr;
      error = cudaMalloc(&memory, 1);
      if (memory != nullptr) cudaFree(memory);
    }).join();
    return error == cudaSuccess;
  };
  const auto is_allowed_here = [] {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, 1);
    if (memory != nullptr) cudaFree(memory);
    return error == cudaSuccess;
  };
  const auto end = [&] {
    cudaGraph_t graph = nullptr;
    const cudaError_t error = cudaStreamEndCapture(work, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    return error == cudaSuccess;
  };
  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_FALSE(is_allowed_elsewhere());
  EXPECT_FALSE(end());
  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_TRUE(is_allowed_elsewhere());
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_TRUE(is_allowed_here()) << "the thread has relaxed";
  ASSERT_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  EXPECT_FALSE(is_allowed_here());
  EXPECT_FALSE(end());
  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_TRUE(is_allowed_elsewhere());
  EXPECT_TRUE(is_allowed_here());
  EXPECT_TRUE(end());
}

TEST_F(Graphs, EndsThatAreRefused) {
  cudaStream_t work = stream(), other = stream();
  auto* value = device_memory<int>(1);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(work, &graph), cudaErrorIllegalState) << "nothing has begun";

  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeRelaxed), cudaErrorIllegalState);
  fork(work, other);
  ASSERT_EQ(cudaMemsetAsync(value, 0, 1, other), cudaSuccess);
  EXPECT_EQ(cudaStreamEndCapture(work, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess) << "the other stream is free again";

  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeRelaxed), cudaSuccess);
  fork(work, other);
  EXPECT_EQ(cudaStreamEndCapture(other, &graph), cudaErrorStreamCaptureUnmatched);
  EXPECT_EQ(cudaStreamEndCapture(work, &graph), cudaErrorStreamCaptureInvalidated);

  ASSERT_EQ(cudaStreamBeginCapture(work, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  std::thread([&] {
    cudaGraph_t theirs = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(work, &theirs), cudaErrorStreamCaptureWrongThread);
  }).join();
  EXPECT_EQ(cudaStreamEndCapture(work, &graph), cudaErrorStreamCaptureInvalidated);
}

TEST_F(Graphs, WaitsAcrossCapturesAreRefused) {
  cudaStream_t first = stream(), second = stream(), plain = stream();
  cudaEvent_t captured = event();
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(first, cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(second, cudaStreamCaptureModeRelaxed), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(captured, first), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(second, captured, 0), cudaErrorStreamCaptureMerge);
  EXPECT_EQ(cudaStreamEndCapture(first, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamEndCapture(second, &graph), cudaErrorStreamCaptureInvalidated);

  EXPECT_EQ(cudaStreamWaitEvent(plain, captured, 0), cudaErrorCapturedEvent)
      << "recorded in a capture that is over";
  EXPECT_EQ(cudaEventQuery(captured), cudaErrorCapturedEvent);
  EXPECT_EQ(cudaEventRecord(captured, plain), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(captured), cudaSuccess) << "recorded anew";
}

TEST_F(Graphs, FailingKernelInOneEndsItsDevice) {
  cudaStream_t origin = stream(), other = stream();
  auto* value = device_memory<int>(1);
  cudaGraphExec_t graph = capture(origin, [&] {
    fork(origin, other);
    cuda::launch(add, dim3(1), dim3(32), 0, other, value, 1);
    fork(other, origin);
  });
  fail_after("kernel", 1, cudaErrorIllegalAddress);

  ASSERT_EQ(cudaGraphLaunch(graph, origin), cudaSuccess);

  EXPECT_EQ(cudaStreamSynchronize(origin), cudaErrorIllegalAddress);
}

}  // namespace
}  // namespace cpattn::fake_cuda
